"""What a device holds while it runs a partitioned program."""
