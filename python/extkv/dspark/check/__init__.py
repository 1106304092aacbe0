"""How many drafts of a drafter its target accepts, and whether its file is read as it was trained.

`text` runs the target over text of its own, `acceptance` compares both models' laws there,
`neighbours` lists the readings of a file that are one mistake away, and `report` says which of them
accepts clearly more than the one that the file names.
"""

from extkv.dspark.check.acceptance import Acceptance
from extkv.dspark.check.neighbours import FileKeys, Neighbour, neighbours_of, read_file_keys
from extkv.dspark.check.report import CheckReport, Comparison, check_draft
from extkv.dspark.check.text import TargetText, read_text

__all__ = [
    "Acceptance",
    "CheckReport",
    "Comparison",
    "FileKeys",
    "Neighbour",
    "TargetText",
    "check_draft",
    "neighbours_of",
    "read_file_keys",
    "read_text",
]
