"""``DataParallel``: the processes of one machine compute shares of each batch for this one."""
