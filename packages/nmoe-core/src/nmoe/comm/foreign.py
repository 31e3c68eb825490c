# SPDX-License-Identifier: Apache-2.0
"""Tensors over memory that PyTorch did not allocate, and what ranks tell each other while they make it.

A peer's memory, mapped here, belongs to the peer's device; the tensor over it is given *this* process's device all the
same, because kernels that run here dereference it. That rules out `__cuda_array_interface__`, whose consumer asks the
driver for the device and copies where it differs, and leaves DLPack, which states it.
"""

import ctypes

import torch
import torch.distributed as dist
from torch import Tensor

from nmoe.errors import EnvironmentFault

__all__ = ["Told", "agree", "tensor_over"]

_CPU, _CUDA, _UINT = 1, 2, 1  # kDLCPU, kDLCUDA, kDLUInt of dlpack.h


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


# PyTorch reads a descriptor once more when the last view of the tensor dies, which may be after everything else here; so
# these 72 bytes a buffer are kept until the process ends.
_descriptors: list[_DLManagedTensor] = []


def tensor_over(address: int, nbytes: int, device: torch.device) -> Tensor:
    """A uint8 tensor over memory that somebody else owns and frees; no copy is made.

    Args:
        address: Of the first byte, as this process sees it.
        nbytes: Length.
        device: Whose kernels will read and write it: a CPU, or a CUDA device with an index.
    """
    shape = (ctypes.c_int64 * 1)(nbytes)
    descriptor = _DLManagedTensor()
    tensor = descriptor.tensor
    tensor.data, tensor.ndim, tensor.shape = address, 1, shape
    tensor.device_type, tensor.device_id = (_CUDA, device.index) if device.type == "cuda" else (_CPU, 0)
    tensor.code, tensor.bits, tensor.lanes = _UINT, 8, 1
    _descriptors.append(descriptor)
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return torch.from_dlpack(capsule(ctypes.addressof(descriptor), b"dltensor", None))


Told = tuple[str, bytes]
"""What a rank tells the others: an error (empty for none), and bytes."""


def agree(own: Told, group: dist.ProcessGroup, *, what: str) -> list[bytes]:
    """Tell all ranks this one's bytes, or that it failed; so that either all go on or all end, each with the reason.

    Args:
        own: Of this rank.
        group: All ranks, over a backend that moves CPU tensors (gloo).
        what: The step, for the message.

    Returns:
        The bytes of every rank, in rank order.

    Raises:
        EnvironmentFault: Some rank failed; the message names the first.
    """
    told: list[Told] = [("", b"")] * dist.get_world_size(group)
    dist.all_gather_object(told, own, group=group)
    for rank, (error, _) in enumerate(told):
        if error:
            raise EnvironmentFault(f"{what}: rank {rank}: {error}")
    return [payload for _, payload in told]
