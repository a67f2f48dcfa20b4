"""Test suites of other projects, run against the installed versions with and without this library's experts."""
