"""Captures calls that do not wait for the GPU."""

import torch


def replayed(call):
    """Makes the call, makes it without waits, captures it and replays it. Returns the graph and
    the captured call's result."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = call()
        graph.replay()
    torch.cuda.synchronize()
    return graph, result
