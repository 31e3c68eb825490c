# SPDX-License-Identifier: Apache-2.0
"""nmoe trains Mixture-of-Experts language models. Importing it has no effects."""

__version__ = "0.1.0"
