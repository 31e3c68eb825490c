# SPDX-License-Identifier: Apache-2.0
"""The installed command `nviz` starts here; no other module may lie in this folder, which comes first on the import path."""

from nviz.app import main

main()
