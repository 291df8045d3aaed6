"""The report of a run and the findings of its doctor. The run is given by name, or simulated from a plan.

runs_by_name --> summary                           a run, or a plan's simulated step; in numbers
     |
     +--> report/   encode, sections, curves --> page      one HTML page
     |
     +--> doctor/   case --> balance, bubbles, ... --> examine      findings, the largest gain first
"""
