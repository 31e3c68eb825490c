# SPDX-License-Identifier: Apache-2.0
"""The dashboard: pages over published metric stores, read-only."""
