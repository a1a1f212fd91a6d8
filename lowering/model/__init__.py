"""A program as the planner sees it: nodes that choose among candidates, values that lead from node to node, prices."""
