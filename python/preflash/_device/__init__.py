"""Devices, their memory, and which backend serves them.

stream      the current stream of a device
buffers     memory that several streams may use
workspace   the float and int workspaces of a wrapper
backends    "auto", "fa2", "fa3", "cpu": which one serves which device and options, and its plans
gpus        whether this build has kernels for the GPUs of the machine, and wheel, torch and driver
            go together
"""
