# SPDX-License-Identifier: Apache-2.0
"""Operations whose speed decides the speed of training, each in a folder of its own.

``ops/<op>/__init__.py`` is the contract: a protocol `Kernels` with shapes, dtypes and meaning, and where the op is
differentiable by itself, the function that the model calls. ``reference.py`` defines the meaning in plain torch and is
the oracle of every test; ``sm90a.py``, ``sm100a.py`` (tensor cores) and ``cuda.py`` (shared by both chips) are the
kernels. ``ls ops/*`` is the support matrix.

Rules for every kernel: no host synchronisation; shapes on the host never depend on routing; bit-identical results from
run to run; offsets in 64 bits where rows x width can pass 2^31; what belongs to an expert without tokens is exactly
zero. The reference keeps the meaning of these rules, but may wait for the device.
"""
