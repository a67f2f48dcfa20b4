"""Schedules as plain Python, without torch; users import them from `fusedmoe.plans`. The way of a plan:

task, plan                              tasks, what each waits for, and a plan: an order for each resource
cost, workload, step_costs              what a machine, a layer and a step of layers take
machines, refit                         costs of machines that nobody measured, and of steps that ran
passes, step, list_schedule             orders of one pass's chunks, of a step's tasks, and of any tasks
policies                                published systems: functions from costs to a plan
events, simulate, bound                 what a plan takes, and what no plan can beat
timeline, draw                          what ran, or would run, when; and its picture
tuning                                  the fastest plan, by trying while a job trains
"""
