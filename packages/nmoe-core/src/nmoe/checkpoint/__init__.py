# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: `store` is the format on disk (no torch), `save` writes in the background, `load` reads into tensors."""
