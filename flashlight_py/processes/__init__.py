"""New processes of this machine: their links, tasks and pipes, and what kills them at the end."""
