"""Finds where a kernel's machine code touches local memory, in the output of cuobjdump.

`python tools/sass.py LIBRARY...` prints the local accesses of each kernel's main loops.

A kernel's main loops are the innermost loops that hold both matrix products and exponentials. A
loop is that of a backward branch: its header dominates the branch (natural loops). Convergence
barriers jump, too: a BSYNC continues where the BSSY that it meets says.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PRODUCT = re.compile(r"[HIQ]G?MMA")
EXPONENTIAL = re.compile(r"MUFU\.EX2")
LOCAL = re.compile(r"LDL|STL")
FUNCTION = re.compile(r"\s*Function : (\S+)")
ARCH = re.compile(r"\s*arch = (\w+)")
INSTRUCTION = re.compile(
    r"\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<name>[A-Z][\w.]*)"
    r"\s*(?P<operands>.*?)\s*;"
)
TARGET = re.compile(r"(0x[0-9a-f]+)\s*$")
COPY_TO_TWO = re.compile(r"\[R\d+\+UR")
JUMPS = {"BRA", "JMP"}
ENDS = {"EXIT", "RET", "BRX", "JMX", "KILL"}
BREAKS_BLOCK = JUMPS | ENDS | {"CALL", "BSYNC", "BREAK"}


def find_cuobjdump() -> str | None:
    """Path of cuobjdump in the toolkit or the package nvidia-cuda-cuobjdump; None if missing."""
    found = shutil.which("cuobjdump")
    if found:
        return found
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        for path in sorted(Path(folder).glob("*/bin/cuobjdump")):
            return str(path)
    return None


@dataclass(frozen=True)
class Instruction:
    address: int
    guard: str | None  # its predicate
    name: str  # with modifiers
    operands: str

    @property
    def opcode(self) -> str:
        return self.name.split(".")[0]

    @property
    def target(self) -> int | None:
        found = TARGET.search(self.operands)
        return int(found[1], 16) if found else None

    @property
    def may_fall_through(self) -> bool:
        if self.opcode not in JUMPS | ENDS | {"BSYNC"}:
            return True
        if self.guard is not None and self.guard != "!PT":
            return True
        # BRA.U UP0, ..., BRA P0, ...; BRA.DIV and BRA.CONV look at the warp.
        named = re.match(r"!?U?P\d", self.operands)
        return self.opcode == "BRA" and bool(named or re.search(r"\.(DIV|CONV)", self.name))


@dataclass(frozen=True)
class Kernel:
    symbol: str
    arch: str
    code: list[Instruction]


def read_kernels(lines: Iterable[str]) -> Iterator[Kernel]:
    symbol, arch, code = "", "", []
    for line in lines:
        if found := INSTRUCTION.match(line):
            address = int(found["address"], 16)
            code.append(Instruction(address, found["guard"], found["name"], found["operands"]))
        elif found := ARCH.match(line):
            next_arch = found[1]
        elif found := FUNCTION.match(line):
            if symbol:
                yield Kernel(symbol, arch, code)
            symbol, arch, code = found[1], next_arch, []
    if symbol:
        yield Kernel(symbol, arch, code)


def disassemble(cuobjdump: str, path: Path) -> Iterator[Kernel]:
    with subprocess.Popen([cuobjdump, "-sass", path], stdout=subprocess.PIPE, text=True) as run:
        yield from read_kernels(run.stdout)
    if run.returncode != 0:
        raise RuntimeError(f"{cuobjdump} -sass {path} failed with {run.returncode}")


class Flow:
    """The basic blocks of a kernel, where each may continue, and its loops."""

    def __init__(self, code: list[Instruction]):
        self.code = code
        places = {instruction.address: place for place, instruction in enumerate(code)}
        self._targets = {
            place: places[instruction.target]
            for place, instruction in enumerate(code)
            if instruction.opcode in JUMPS | {"CALL", "BSSY"} and instruction.target in places
        }
        begins = {0, *self._targets.values()}
        begins |= {i + 1 for i, x in enumerate(code) if x.opcode in BREAKS_BLOCK}
        ordered = sorted(begin for begin in begins if begin < len(code))
        self.blocks = [
            range(begin, end) for begin, end in zip(ordered, [*ordered[1:], len(code)], strict=True)
        ]
        self._block_at = {block.start: i for i, block in enumerate(self.blocks)}
        self.successors = [self._jumps_of(i) for i in range(len(self.blocks))]
        self._follow_convergence()
        self._dominate()

    def _jumps_of(self, block: int) -> set[int]:
        last = self.blocks[block][-1]
        found = set()
        if last in self._targets and self.code[last].opcode != "BSSY":
            found.add(self._block_at[self._targets[last]])
        if self.code[last].may_fall_through and block + 1 < len(self.blocks):
            found.add(block + 1)
        return found

    def _follow_convergence(self) -> None:
        """Adds where a BSYNC may continue: at the target of each BSSY of its register before it."""
        known: list[dict[str, frozenset[int]]] = [{} for _ in self.blocks]
        seen, work = {0}, [0]
        while work:
            block = work.pop()
            state = dict(known[block])
            for place in self.blocks[block]:
                if self.code[place].opcode == "BSSY" and place in self._targets:
                    register = self.code[place].operands.split(",")[0].strip()
                    state[register] = frozenset([self._block_at[self._targets[place]]])
            last = self.code[self.blocks[block][-1]]
            if last.opcode == "BSYNC":
                self.successors[block] |= state.get(last.operands.strip(), frozenset())
            for successor in self.successors[block]:
                merged = dict(known[successor])
                for register, targets in state.items():
                    merged[register] = merged.get(register, frozenset()) | targets
                if merged != known[successor] or successor not in seen:
                    seen.add(successor)
                    known[successor] = merged
                    work.append(successor)

    def _dominate(self) -> None:
        """Immediate dominators, by Cooper, Harvey and Kennedy."""
        self.predecessors: list[list[int]] = [[] for _ in self.blocks]
        for block, successors in enumerate(self.successors):
            for successor in successors:
                self.predecessors[successor].append(block)
        order = self._reverse_postorder()
        number = {block: i for i, block in enumerate(order)}
        self._above = {0: 0}
        changed = True
        while changed:
            changed = False
            for block in order[1:]:
                ready = [p for p in self.predecessors[block] if p in self._above]
                new = ready[0]
                for other in ready[1:]:
                    while new != other:
                        while number[other] > number[new]:
                            other = self._above[other]
                        while number[new] > number[other]:
                            new = self._above[new]
                changed |= self._above.get(block) != new
                self._above[block] = new

    def _reverse_postorder(self) -> list[int]:
        order, seen = [], {0}
        stack = [(0, iter(self.successors[0]))]
        while stack:
            block, rest = stack[-1]
            following = next((x for x in rest if x not in seen), None)
            if following is None:
                order.append(block)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(self.successors[following])))
        return order[::-1]

    def _dominates(self, block: int, other: int) -> bool:
        while other not in (block, 0):
            other = self._above[other]
        return other == block

    def loops(self) -> list[set[int]]:
        """The blocks of each loop."""
        bodies: dict[int, set[int]] = {}
        for block in self._above:
            for header in self.successors[block]:
                if self._dominates(header, block):
                    bodies.setdefault(header, {header}).update(self._loop_of(header, block))
        return list(bodies.values())

    def _loop_of(self, header: int, latch: int) -> set[int]:
        body, work = {header}, [latch]
        while work:
            block = work.pop()
            if block not in body:
                body.add(block)
                work += [p for p in self.predecessors[block] if p in self._above]
        return body

    def count(self, pattern: re.Pattern, blocks: Iterable[int]) -> int:
        return sum(
            pattern.match(self.code[place].name) is not None
            for block in blocks
            for place in self.blocks[block]
        )

    def main_loops(self) -> list[set[int]]:
        found = [
            body
            for body in self.loops()
            if self.count(PRODUCT, body) and self.count(EXPONENTIAL, body)
        ]
        return [body for body in found if not any(other < body for other in found)]


def has_two_addresses(instruction: Instruction) -> bool:
    """True if a copy to shared memory adds a uniform register to its target's address."""
    return instruction.opcode == "LDGSTS" and bool(COPY_TO_TWO.match(instruction.operands))


def local_accesses_of_main_loops(code: list[Instruction]) -> int:
    """Instructions that read or write local memory there, in paths that are seldom taken, too."""
    if not any(LOCAL.match(instruction.name) for instruction in code):
        return 0
    flow = Flow(code)
    loops = flow.main_loops()
    if not loops:
        raise ValueError("no loop holds both matrix products and exponentials")
    return flow.count(LOCAL, set().union(*loops))


def main(libraries: list[str]) -> None:
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        raise SystemExit("no cuobjdump: pip install nvidia-cuda-cuobjdump, or a CUDA toolkit")
    for library in libraries:
        for kernel in disassemble(cuobjdump, Path(library)):
            try:
                accesses = str(local_accesses_of_main_loops(kernel.code))
            except ValueError as error:
                accesses = str(error)
            print(f"{kernel.symbol} ({kernel.arch}): {accesses}")


if __name__ == "__main__":
    main(sys.argv[1:])
