# SPDX-License-Identifier: Apache-2.0
"""The transformer of the DeepSeek-V3 family: what it computes, what it starts from, what it weighs, what it says."""
