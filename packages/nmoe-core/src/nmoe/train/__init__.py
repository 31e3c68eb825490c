# SPDX-License-Identifier: Apache-2.0
"""The training program: `loop` is the step and the run around it; the other files are its parts, one noun each."""
