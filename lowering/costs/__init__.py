"""What communication and work cost: the cost model, of published or measured rates, per axis and major part of one."""
