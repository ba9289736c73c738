"""The tests on real servers that `./dev test` runs: for each promise of the README one or a few. All others: `./dev test all`."""

from __future__ import annotations

PROMISES = {
    "the main job, through verifiers, and resumed": (
        "integration/test_verifiers_eval.py::test_the_main_job_needs_no_key_and_resumes",
        "integration/test_verifiers_eval.py::test_an_unknown_environment_is_one_line_before_anything_heavy",
        "integration/test_verifiers_rollouts.py::test_a_conversation_with_tools_and_reasoning_is_one_branch",
        "integration/test_verifiers_rollouts.py::test_the_same_over_the_responses_api",
        "integration/test_verifiers_rollouts.py::test_a_group_trains",
        "integration/test_verifiers_rollouts.py::test_a_policy_that_fails_fails_the_rollout_with_its_status[500]",
        "integration/test_verifiers_rollouts.py::test_a_failure_of_gym_is_one_line",
    ),
    "a run without an SDK, which replays recorded answers or asks an endpoint": (
        "integration/test_run_cli.py::test_without_an_endpoint_the_recordings_are_the_policy",
        "integration/test_run_cli.py::test_several_environments_with_an_endpoint_of_either_dialect",
        "integration/test_run_cli.py::test_failures_are_grouped_and_change_the_exit_code",
        "integration/test_run_cli.py::test_bad_input_is_one_line[args0-no environment 'mcqaa']",
    ),
    "a collection that goes on after a kill": (
        "integration/test_runs_gym.py::test_a_killed_command_goes_on_where_it_was",
    ),
    "an interrupt or a kill leaves nothing": (
        "integration/test_run_cli.py::test_an_interrupt_says_what_was_done_and_stops_everything",
        "integration/test_run_cli.py::test_nothing_outlives_a_second_interrupt_or_a_kill[9]",
    ),
    "a tool call, and no rollout mixed up with another": (
        "integration/test_stack_rollouts.py::test_a_rollout_is_scored_and_recorded",
        "integration/test_stack_rollouts.py::test_many_at_once_do_not_mix",
        "integration/test_stack_rollouts.py::test_the_key_is_nowhere",
        "integration/test_stack_rollouts.py::test_recorded_rewards_come_back",
        "integration/test_agents_all.py::test_no_call_of_a_light_agent_reaches_another_rollouts_policy[simple]",
    ),
    "no hang and no made-up zero": (
        "integration/test_stack_rollouts.py::test_a_rejected_row_is_a_data_failure",
        "integration/test_stack_rollouts.py::test_an_unreachable_policy_is_a_policy_failure",
        "integration/test_stack_rollouts.py::test_an_environments_own_error_names_the_server",
        "integration/test_stack_rollouts.py::test_a_deadline_ends_the_rollout",
        "integration/test_stack_rollouts.py::test_cancelling_ends_the_rollout_and_leaves_others",
        "integration/test_stack_rollouts.py::test_a_limit_on_calls_truncates",
        "integration/test_stack_deaths.py::test_a_dead_server_fails_its_rollouts_and_comes_back",
        "integration/test_rollout_outcomes.py::test_no_policy_call_no_reward",
    ),
    "a judge": (
        "integration/test_stack_versions.py::test_judges_have_endpoints_of_their_own[endpoint]",
        "integration/test_stack_judges.py::test_a_judge_that_dies_fails_the_rollouts_that_it_was_asked_for[answers 500]",
    ),
    "a hostile answer": ("faults/test_faults_hostile.py::test_hostile_answers_fail_their_own_rollout",),
    "two processes with different keys": (
        "security/test_security_judge_keys.py::test_a_judges_key_serves_its_own_process_only[0.7.0]",
    ),
    "loopback and live keys only": (
        "security/test_security_listeners.py::test_everything_listens_on_loopback_and_needs_a_live_key",
    ),
    "Docker that is not there is refused": (
        "sandbox/test_sandbox_local.py::test_a_provider_without_its_daemon_is_refused_with_those_that_can_be_used",
    ),
    "the data that verifiers, TRL and verl read": (
        "integration/test_data_prepare.py::test_what_is_prepared_is_what_the_taskset_and_trl_read",
        "unit/test_trl_sources.py::test_agents_of_an_environment_with_several_configs",
    ),
    "a check by recordings": (
        "integration/test_quality_environments.py::test_recordings_are_compared_line_by_line",
    ),
    "any environment by name, and the machine looked at": ("integration/test_runtime_gym.py::test_doctor",),
    "from Python": ("integration/test_examples.py::test_an_example_runs[run_environment.py-completed 1.0]",),
}
TESTS = frozenset(name for names in PROMISES.values() for name in names)
