"""Values too large to be whole on a device, computed part by part: scores of attention, logits of a loss.

A group of ops around such a value that share a factor, as heads, queries or tokens, and are independent along it but
for sums at the end, becomes a loop over parts of the factor. It is partitioning over time where the rest of the
planner partitions over devices: the same rules of the ops say what each part takes and makes.

%s = dot %q, %k            while (%i from 0 to parts) {
%p = softmax %s      ->      %qi = part %i of %q; %si = dot %qi, %k; %pi = softmax %si; %oi = dot %pi, %v
%o = dot %p, %v              part %i of %o = %oi }

Source: loop blocking (strip-mining) of compilers; Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory" (2021),
for what comes of it with attention.
"""
