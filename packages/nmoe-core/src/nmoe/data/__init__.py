# SPDX-License-Identifier: Apache-2.0
"""From text to batches: `prep` and `builtin` make shards, `packing` cuts rows, `loader` delivers them in order."""
