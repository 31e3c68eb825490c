# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism by direct dispatch and return: rows go straight to the rank that owns the expert, and back.

`layer` is the table of contents. Its five calls are one file each: `plan`, `dispatch`, (group is an op), `experts`,
`combine`; `router` stands before them.
"""
