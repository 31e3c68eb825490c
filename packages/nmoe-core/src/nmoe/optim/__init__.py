# SPDX-License-Identifier: Apache-2.0
"""What turns gradients into new values: clipping, AdamW on master values, learning-rate schedules."""
