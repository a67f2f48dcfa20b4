"""Other projects' own tests, run against the installed versions with and without this library's experts."""
