"""Repositories of tasks hold tests of their own, which are no tests of this project."""

collect_ignore_glob = ["*"]
