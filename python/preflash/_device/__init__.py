"""Devices, their memory, and which backend serves them.

stream      the current stream of a device
workspace   checks of float and int workspaces
backends    "auto", "fa2", "fa3", "cpu": which one serves which device and options, and its plans
gpus        whether this build has kernels for the GPUs of the machine, and wheel, torch and driver
            go together
"""
