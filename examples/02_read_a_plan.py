"""2. Read a plan: the whole of it, one parameter, and what stands in the file.

python examples/02_read_a_plan.py            # the command line says the same: hpsearch explain plan.json
"""

from rich import print

import hpsearch
from hpsearch.plan.explain import explain, explain_parameter

plan = hpsearch.Plan.load("plan.json")
print(explain(plan))

print("\n[bold]Why is the down projection where it is?[/bold]")
print(explain_parameter(plan, "model.layers.0.mlp.down_proj.weight"))

# The file is plain data, every field described in hpsearch/plan/schema.py.
best = plan.file.certificate
print(f"\n{best.status}: {best.objective_s:.3f} s, nothing in this space is faster than {best.bound_s:.3f} s")
print(f"{best.considered} candidates, {best.solved} solved exactly, {best.pruned} ruled out by their bounds")
