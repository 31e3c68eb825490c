# SPDX-License-Identifier: Apache-2.0
"""What turns gradients into new values: clipping, AdamW and Muon on master values, learning-rate schedules."""
