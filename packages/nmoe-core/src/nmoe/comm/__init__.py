# SPDX-License-Identifier: Apache-2.0
"""Memory that the ranks of an expert-parallel group share. `nmoe.rdep` speaks to it, nothing else does."""
