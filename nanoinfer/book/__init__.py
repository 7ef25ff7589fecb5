"""The book: chapters on disk, running them, the numbers their prose quotes, and the pages.

Read `chapter` (what counts as fresh), then `execute`; a chapter itself imports from `results`.
"""
