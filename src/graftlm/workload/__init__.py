"""Batches of requests that are only there to be timed, what they took, and what the machine could have done at best."""

from graftlm.workload.figures import FIGURES, Figure, Figures, median_figures, summarize
from graftlm.workload.machine_limits import MachineLimits, measure_limits
from graftlm.workload.measurement import MeasuredWorkload, Measurement, measure_workloads
from graftlm.workload.model_cost import ModelCost
from graftlm.workload.random_adapter import write_random_adapter
from graftlm.workload.run import Step, WorkloadRun, run_workload
from graftlm.workload.step_costs import measure_costs
from graftlm.workload.workload import Workload

__all__ = [
    "FIGURES",
    "Figure",
    "Figures",
    "MachineLimits",
    "MeasuredWorkload",
    "Measurement",
    "ModelCost",
    "Step",
    "Workload",
    "WorkloadRun",
    "measure_costs",
    "measure_limits",
    "measure_workloads",
    "median_figures",
    "run_workload",
    "summarize",
    "write_random_adapter",
]
