"""A partitioned function and its calls: `partition`, plans of calls, how they are dispatched, derivatives."""
