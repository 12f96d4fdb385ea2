"""Where TRL 1.16.0 and veRL 0.9.1 compute something else than we do, and why.

Every entry of `DIFFERENCES` belongs to a case of pg_parity.py, in which our numbers are turned into
theirs by what the entry says. tools/pg_parity_table.py prints all of this.
"""

from __future__ import annotations

_ALONE = (
    "A prompt with a single scored sample: veRL takes its reward for the advantage. Ours is 0,"
    " because one sample has nothing to be compared with."
)
_WHITEN = (
    "veRL whitens with 1/sqrt(var + 1e-8), we with 1/(std + eps): the same up to eps, which is set"
    " to match."
)
_TOKEN_MEAN = "veRL divides each row by its length + 1e-8."
_TO_LOGPROB = (
    "veRL's loss is -A sg(m rho) logp, ours -A m rho with the gradient of logp: one gradient,"
    " another value. veRL always bounds rho (clip_ratio_c); ours does with `truncate`."
)
_MASKED = (
    "It divides by all rows, also by those without a trained token. We divide by the rows that are"
    " trained; the factor is 10/12 here."
)
_REJECT = (
    "veRL's bounds are of the inverse ratio (k1 = sampler - trainer): `0.7_1.2` keeps 1/1.2 <= rho"
    " <= 1/0.7. It only masks, and takes what it rejects out of the response mask; ours keeps rho"
    " as weight, and what is dropped in the denominators."
)

DIFFERENCES: dict[tuple[str, str], str] = {
    # TRL
    (
        "TRL",
        "leave_one_out, whiten",
    ): (
        "TRL normalises over rows, we over trained tokens, of which long rows have more. Compared"
        " with one token per row."
    ),
    (
        "TRL",
        "ppo_clip, token_mean, one micro-batch",
    ): (
        "bnpo is the token mean of each micro-batch: ours while there is only one. Cut further it"
        " weighs micro-batches alike, however many tokens they have; ours does not depend on the"
        " cut."
    ),
    ("TRL", "truncated rows left out, sequence_mean"): _MASKED,
    ("TRL", "truncated rows left out, fixed_length"): _MASKED,
    (
        "TRL",
        "cispo",
    ): "TRL's epsilon_high is the cap itself, as ours; the paper writes 1 + epsilon_high.",
    (
        "TRL",
        "sapo",
    ): (
        "TRL's sapo takes the mean of each sequence first; our `sapo` is token_mean and has to be"
        " told. Its temperatures are float32."
    ),
    (
        "TRL",
        "vespo",
    ): (
        "TRL's vespo is a token mean, ours a sequence mean unless told. log w is not below log 1e-8"
        " there, -20 here."
    ),
    (
        "TRL",
        "vespo, old engine and a cap",
    ): (
        "TRL multiplies its truncated token weights min(old/sampler, cap) into w. Ours takes"
        " policy/sampler as it is."
    ),
    (
        "TRL",
        "off_policy_mask",
    ): (
        "TRL compares the sampler with the policy at each update, we with the log-probs before the"
        " first one. Compared where both are the same."
    ),
    (
        "TRL",
        "top_entropy, share 0.2",
    ): (
        "TRL takes an interpolated quantile of each micro-batch, we the highest ceil(share M)"
        " tokens of the whole batch: at most one token apart in a single micro-batch, none here."
    ),
    (
        "TRL",
        "kl k3+ in the loss, weighted",
    ): (
        "TRL lets the gradient of rho k3 go through rho, which makes it rho times that of k2: our"
        " `k3+`, which says so."
    ),
    (
        "TRL",
        "gspo, kl in the loss, weighted",
    ): (
        "TRL weighs the KL of each token by the ratio of the sequence and lets the gradient"
        " through; ours by the ratio of the token, detached."
    ),
    (
        "TRL",
        "kl k3 in the loss, corrected by tis",
    ): (
        "TRL corrects the surrogate only. So do we with kl_importance=False; otherwise the weights"
        " of the correction are in the KL term too."
    ),
    (
        "TRL",
        "entropy bonus, sequence_mean",
    ): "TRL's bonus is the mean over tokens for every loss type; ours is reduced as the loss is.",
    (
        "TRL",
        "adaptive_entropy",
    ): (
        "At the target itself TRL's coefficient rises, ours stays. TRL applies it only after a step"
        " at or below the target, we always."
    ),
    # veRL
    ("veRL", "group_relative"): "veRL's eps is 1e-6, ours 1e-4 unless set.",
    (
        "veRL",
        "group_relative, vectorised",
    ): (
        "eps 1e-6. Statistics are float32 whatever the rewards are: float64 rewards of 0.1 in a"
        " group without signal get advantages of 1e-3."
    ),
    ("veRL", "group_relative, a group of one"): f"{_ALONE} eps 1e-6.",
    ("veRL", "group_relative, vectorised, a group of one"): f"{_ALONE} eps 1e-6.",
    ("veRL", "group_relative, scale none, a group of one"): _ALONE,
    (
        "veRL",
        "leave_one_out, a group of one",
    ): f"{_ALONE} veRL's vectorised version gives 0 as we do.",
    ("veRL", "optimal_baseline, a group of one"): _ALONE,
    ("veRL", "group_whitened"): _WHITEN,
    ("veRL", "group_whitened, a group of one"): f"{_ALONE} {_WHITEN}",
    (
        "veRL",
        "decoupled",
    ): (
        "veRL whitens the sum over trained tokens and takes its mean off; we divide by its std over"
        " episodes, whose mean is 0. eps 1e-6. It has no unscored components: they are 0 here."
    ),
    ("veRL", "return_to_go"): _WHITEN,
    (
        "veRL",
        "gae",
    ): (
        f"{_WHITEN} veRL takes 0 for the value after the last token also where a row was cut off;"
        " we take the critic's."
    ),
    (
        "veRL",
        "gpg",
    ): "veRL scales by rows / rows whose reward is not 0, we by groups / groups with signal.",
    ("veRL", "gpg, a group of one"): f"{_ALONE} The scale is rows / rows whose reward is not 0.",
    (
        "veRL",
        "pass_at_k",
    ): (
        "veRL's k is the size of the group; ours any. veRL divides by the std unless told"
        " otherwise."
    ),
    (
        "veRL",
        "pass_at_k, divided by the std",
    ): (
        "veRL divides by std + 1e-6. Ours is not scaled: it estimates the gradient of the expected"
        " best of k without bias, up to a constant."
    ),
    (
        "veRL",
        "greedy_baseline, with token rewards",
    ): "veRL adds the token rewards from each token on, we those of the whole row.",
    (
        "veRL",
        "ppo_clip, token_mean",
    ): (
        "veRL's vanilla loss always has a dual clip, at 3 unless set (switched off here); ours has"
        " none unless set."
    ),
    ("veRL", "ppo_clip, sequence_mean"): _TOKEN_MEAN,
    ("veRL", "truncated rows left out, sequence_mean"): f"{_MASKED} {_TOKEN_MEAN}",
    ("veRL", "truncated rows left out, sequence_sum"): _MASKED,
    ("veRL", "truncated rows left out, fixed_length"): _MASKED,
    (
        "veRL",
        "gspo",
    ): (
        f"{_TOKEN_MEAN} veRL has the token form (gspo_token), whose gradient is the same where"
        " advantages do not differ within a row."
    ),
    ("veRL", "gspo_token"): f"{_TOKEN_MEAN} log s is not above 10 there, 20 here.",
    (
        "veRL",
        "sapo",
    ): (
        f"{_TOKEN_MEAN} veRL's sapo is always a mean of each sequence first; our `sapo` is"
        " token_mean and has to be told."
    ),
    (
        "veRL",
        "gmpo",
    ): f"{_TOKEN_MEAN} It divides by all rows, also by those without a trained token.",
    (
        "veRL",
        "cispo",
    ): (
        "veRL clips to [1 - low, 1 + high]; low = 1 switches the lower bound off, and our cap is 1"
        " + high."
    ),
    (
        "veRL",
        "cispo, with a lower bound",
    ): "Ours has no lower bound. Where rho < 1 - low, veRL's gradient is (1 - low)/rho of ours.",
    ("veRL", "dppo_tv"): _TO_LOGPROB,
    ("veRL", "dppo_tv, truncate"): _TO_LOGPROB,
    ("veRL", "dppo_kl"): _TO_LOGPROB,
    (
        "veRL",
        "clip_cov",
    ): (
        "veRL draws at random among the tokens in range (here it takes them all), takes the"
        " covariance of the current log-probs at each update, and leaves tokens alone that the clip"
        " has cut already. Ours takes the highest, once, and drops them clipped or not: no gradient"
        " either way."
    ),
    (
        "veRL",
        "clip_cov, on-policy",
    ): "The first update: the same, but for the random draw, which is switched off here.",
    (
        "veRL",
        "kl_cov",
    ): (
        "veRL takes the covariance of the current log-probs at each update, we of those before the"
        " first one (here: the current ones). Its coefficient is 0.1 unless set, ours 1."
    ),
    (
        "veRL",
        "kl k3 in the loss",
    ): (
        "Neither veRL's KL term nor TRL's plain one is weighted by rho; ours is unless"
        f" kl_importance=False. {_TOKEN_MEAN}"
    ),
    ("veRL", "kl k3"): "veRL's k3 is not above 10 per token, and has no gradient there.",
    ("veRL", "mis"): _REJECT,
    ("veRL", "seq_mask, kept"): _REJECT,
    ("veRL", "seq_mask geometric, kept"): _REJECT,
    ("veRL", "entropy bonus, sequence_mean"): _TOKEN_MEAN,
    ("veRL", "adaptive_kl"): "Ours moves no further than by one horizon, however large the batch.",
}

LOOSER: dict[tuple[str, str], float] = {  # float64, where a peer adds 1e-8 to what it divides by
    ("veRL", method): 1e-7
    for method in (
        "ppo_clip, sequence_mean",
        "truncated rows left out, sequence_mean",
        "gspo",
        "gspo_token",
        "sapo",
        "gmpo",
        "kl k3 in the loss",
        "entropy bonus, sequence_mean",
    )
}

EVERYWHERE: dict[str, list[str]] = {
    "TRL": [
        (
            "Rewards and advantages are float32; ours are float64 inside. Groups are read from the"
            " position of a row; ours from its id."
        ),
        "Ratios are a plain exp; ours have log-ratios clamped to +-20.",
        (
            "Means over sequences are taken per micro-batch and averaged (grpo, dr_grpo, sapo,"
            " luspo, gmpo): the same only while all micro-batches have equally many rows."
        ),
        (
            "Defaults: loss type dapo with clip 0.2/0.2 and without dynamic sampling; with vLLM, a"
            " sequence mask at 3 against engine mismatch (ours: none unless set)."
        ),
    ],
    "veRL": [
        (
            "Rewards, groups and advantages are of padded rows, one sample an episode. Every row"
            " has a reward."
        ),
        "Log-ratios are clamped to +-20 as ours, but not in clip_cov, kl_cov and geo_mean.",
    ],
}

ONLY_THERE: dict[str, list[str]] = {
    "TRL": ["A2PO (a2po)"],
    "veRL": [
        "a baseline for each token (optimal_token_baseline, tir_optimal_token_baseline)",
        "the loss dro",
        "aggregation token-sum",
        "kl_penalty abs and k1+",
        "importance weights normalised to mean 1 (rollout_is_batch_normalize)",
        "rejection by k2, k3 or the largest token of a row (rollout_rs)",
        "PF-PPO reweighting",
    ],
}

ONLY_HERE: dict[str, str] = {  # parts that no peer has
    "batch_baseline": "advantage of reinforce",
    "maxrl": "advantage of maxrl",
    "pass_at_k with k below the group": "advantage of passk",
    "gae with lam_critic, length_alpha": "advantages of vapo",
    "nll on positive rows": "term of vapo",
    "advantage clipping": "algorithm.advantage_clip",
}
