# SPDX-License-Identifier: Apache-2.0
"""What the CuTe DSL kernels of all ops share: compiling once, and the shorthand for their arguments."""
