"""A run handles signals, and worker processes of a DataLoader compute."""

import pytest
from processes import python

LONG = """
    import os, signal, threading, time
    import torch
    from preflash.testing import Case, build, runner

    # Background jobs of a shell ignore the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads({threads})
    # It takes minutes if nobody ends it.
    long = build(Case("long", (1 << 16,), (1 << 16,), 4, 4, 64, disable_split_kv=True))
    wrapper = runner.planned(long, backend="cpu")
    small = build(Case("small", (70, 3), (300, 200), 4, 2, 64))

    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        runner.run(wrapper, long)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("not interrupted")
    assert time.monotonic() - start < 60, time.monotonic() - start
    # The threads, the wrapper and its plan go on.
    runner.check(small, backend="cpu")
    runner.plan(wrapper, small)
    runner.compare(small, *runner.run(wrapper, small)).check()
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_control_c_ends_a_run(threads):
    python(LONG.format(threads=threads))


def test_other_signals_are_handled_meanwhile():
    """Their handlers run, and the run goes on to the right end."""
    python("""
        import signal, time
        from preflash.testing import Case, build, runner

        handled = []
        signal.signal(signal.SIGALRM, lambda *_: handled.append(time.monotonic()))
        inputs = build(Case("some", (300, 7), (900, 300), 8, 2, 64))
        wrapper = runner.planned(inputs, backend="cpu")
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        # A run may end before the next signal comes.
        end = time.monotonic() + 60
        while not handled and time.monotonic() < end:
            out, lse = runner.run(wrapper, inputs)
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert handled
        runner.compare(inputs, out, lse).check()
    """)


def test_workers_of_a_data_loader():
    """Forked from a process that has planned, run and started helper threads."""
    python("""
        import preflash
        import torch
        from torch.utils.data import DataLoader, Dataset

        torch.set_num_threads(3)

        class Rows(Dataset):
            def __len__(self):
                return 6

            def __getitem__(self, i):
                q = torch.randn(40 + i, 4, 64, generator=torch.Generator().manual_seed(i))
                return preflash.single_prefill_with_kv_cache(q, q, q, causal=True).sum(dim=0)

        alone = [Rows()[i] for i in range(6)]
        loader = DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork")
        for _ in range(2):
            for got, expected in zip(loader, alone, strict=True):
                torch.testing.assert_close(got, expected)
    """)
