"""What a scheduler is given: a Slurm script, a `ray job submit`, KubeRay manifests.

They make text; nothing here submits anything.
"""
