# SPDX-License-Identifier: Apache-2.0
"""What the command `nviz` becomes: Streamlit, with one line for Ctrl-C during the second in which it is imported."""

import sys

from nmoe.commands import enter

if __name__ == "__main__":
    sys.exit(enter("streamlit.web.cli", "main"))
