"""The one-call API: under budget, equal to eager, and at home in an ordinary training loop."""

import copy
import csv
import gc
import re
import warnings
from typing import ClassVar

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F  # noqa: N812

import rewriter.pipeline
import strategies
from planner.errors import BudgetError, FileFormatError, NoPlan, PlannerError, StrategyError
from planner.explain import Choice
from planner.plan import BoundClass, Plan, with_bound
from planner.solve import Problem, Status, solve
from profiler.errors import CaptureError
from profiler.measuring.restoring import state_kept
from rewriter import CheckpointedStep, OverBudget, VerificationError, checkpoint
from tests.rewriter import tiny
from tests.shared import case_of
from tests.side_by_side import assert_same, eager, history, measured_peak, seeded, snapshot, varied

plain = tiny.models.classify


def make(step=plain, *, optimizer=tiny.sgd, model=tiny.network, batch_size=8):
    """The small network from its seed."""

    def made():
        network = model()
        return step, network, optimizer(network), tiny.images(batch_size)

    return seeded(made)


def adam(model):
    return optim.Adam(model.parameters(), lr=0.01)


def fused_adamw(model):
    return optim.AdamW(model.parameters(), lr=0.01, fused=True)


def planned(workload, budget="60%", **options):
    """The workload's step under a budget, without a progress bar; these tests compare with eager themselves."""
    defaults = {"strategy": "mutwo", "show_progress": False, "verify": False}
    return checkpoint(*workload, budget=budget, **{**defaults, **options})


def unplanned_bytes(step):
    """What the captured step adds to memory without a plan."""
    return step.solution.problem.unplanned.above_start_bytes


@pytest.fixture(autouse=True)
def _no_warning_unless_expected():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


# -- the budget -----------------------------------------------------------------------------------------------------


def test_the_same_budget_in_bytes_in_text_and_in_percent(ordinary):
    by_share = planned(ordinary, "60%")
    problem = by_share.solution.problem
    start = problem.graph.start_bytes
    limit = start + int(0.6 * problem.unplanned.above_start_bytes)
    by_bytes = planned(ordinary, limit)
    by_text = planned(ordinary, f"{limit / 2**20:.12f}MiB")
    budgets = [s.solution.problem.budget_bytes for s in (by_share, by_bytes, by_text)]
    assert max(budgets) - min(budgets) <= 1
    assert budgets[0] < limit, "part of it is kept free for the error of the prediction"
    assert all(s.solution.status is Status.FITS for s in (by_share, by_bytes, by_text))
    assert planned(ordinary, "4GiB").solution.timeline.reruns == 0, "a budget that everything fits needs no plan"


@pytest.mark.parametrize("budget", ["4 parsecs", "0%", 1.5])
def test_a_budget_that_is_none_is_refused(ordinary, budget):
    with pytest.raises(BudgetError, match="budget"):
        planned(ordinary, budget)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"strategy": "no such"}, StrategyError, "there are keep_all, mutwo"),
        ({"budget": "4 bananas"}, BudgetError, "give bytes"),
        ({"budget": "auto"}, BudgetError, "the model is on cpu: say bytes or a share"),
        ({"plan": "no/such/plan.json"}, FileFormatError, "there is no such plan"),
        ({"time_limit_s": float("nan")}, PlannerError, "give the seconds"),
        ({"time_limit_s": 0}, PlannerError, "give the seconds"),
        ({"verify": -1}, PlannerError, "the number of steps"),
        ({"prove_every": -1}, PlannerError, "the number of calls between proofs"),
        ({"most_shapes": 0}, PlannerError, "at least 1"),
    ],
)
def test_bad_input_is_refused_before_anything_is_captured(options, kind, said, monkeypatch):
    monkeypatch.setattr(rewriter.pipeline, "capture", None)
    with pytest.raises(kind, match=said):
        planned(make(), **options)


def test_a_strategy_can_be_an_object(ordinary):
    class Keep:
        name: ClassVar[str] = "keep"

        def plan(self, problem):
            return Plan()

    assert planned(ordinary, "4GiB", strategy=Keep()).solution.strategy == "keep"


def larger():
    return make(batch_size=32)


def state_of(workload):
    return snapshot(None, workload[1], workload[2])


def assert_untouched(workload, before):
    assert_same([before], [state_of(workload)])
    assert not workload[2].state
    assert all(p.grad is None for p in workload[1].parameters())


def test_a_budget_that_no_plan_meets_says_what_would_and_changes_nothing(ordinary):
    workload = ordinary
    before = state_of(workload)
    with pytest.raises(OverBudget) as refusal:
        planned(workload, "1%", strategy="sqrtn")
    message = str(refusal.value)
    for part in (
        "sqrtn: no plan fits",
        "kept free",
        "the smallest peak found is",
        "No plan at all can go under",
        "param",
        "opt_state",
        "gradients and others that cannot be dropped",
        "the tensors and workspace of op",
        "What would help: a smaller batch; free_gradients=True with early_updates=True",
    ):
        assert part in message
    assert_untouched(workload, before)
    enough = int(re.search(r"a budget of at least (\d+) bytes", message)[1])
    assert planned(workload, enough, strategy="sqrtn").solution.status is Status.FITS
    with pytest.raises(OverBudget):
        planned(workload, int(0.99 * enough), strategy="sqrtn")


def test_a_strategy_without_a_plan_says_why(ordinary):
    class Stubborn:
        name: ClassVar[str] = "stubborn"

        def plan(self, problem):
            raise NoPlan("it does not feel like it")

    workload = ordinary
    before = state_of(workload)
    with pytest.raises(OverBudget, match=r"stubborn: no plan fits .* it does not feel like it.* No plan at all"):
        planned(workload, "60%", strategy=Stubborn())
    assert_untouched(workload, before)


def test_where_the_floor_is_lower_another_strategy_is_suggested(ordinary):
    with pytest.raises(OverBudget, match="another strategy or a longer time limit may get below it"):
        planned(ordinary, "90%", strategy="keep_all")


@pytest.mark.usefixtures("captured_once")
@pytest.mark.parametrize("strategy", ["mutwo", "sqrtn"])
def test_a_smaller_budget_takes_less_memory_down_to_the_floor_and_never_more_than_it_says(strategy):
    workload = case_of(larger).workload
    step, budget, peaks = planned(workload, "100GiB", strategy=strategy), None, []
    for _ in range(20):
        start = step.solution.problem.graph.start_bytes
        peak = measured_peak(lambda s=step: s(workload[3]), workload)
        assert budget is None or start + peak <= budget
        assert peak == pytest.approx(step.timeline().above_start_bytes, rel=0.01)
        peaks.append(peak)
        budget = start + int(0.9 * peak)
        try:
            step = planned(workload, budget, strategy=strategy)
        except OverBudget:
            break
    else:
        pytest.fail("no budget was ever too small")
    assert len(peaks) >= 3
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.6 * peaks[0]


@pytest.mark.parametrize("strategy", ["mutwo", "sqrtn", "ilp", "auto"])
def test_along_a_grid_of_budgets_less_never_takes_more(strategy):
    case, peaks = case_of(larger), []  # measured once: other times may make another plan the cheapest
    unplanned = Problem(graph=case.graph, budget_bytes=1).unplanned
    for percent in range(100, 5, -6):
        budget = unplanned.start_bytes + percent * unplanned.above_start_bytes // 100
        solution = solve(Problem(graph=case.graph, budget_bytes=budget), strategies.make(strategy))
        if solution.status is not Status.FITS:
            break
        peaks.append(case.peak(solution.schedule))
    assert len(peaks) >= 6
    assert peaks == sorted(peaks, reverse=True)


# -- the same numbers -------------------------------------------------------------------------------------------------


def assert_loop_equals_eager(workload_of, *, steps=3, between=None, **options):
    """A training loop with the planned step against one with the user's own; `between` runs after each step."""
    own = workload_of()
    with state_kept(*own[1:3]):
        expected = eager(own, steps=steps, between=between)
    workload = workload_of()
    with state_kept(*workload[1:3]):
        step = planned(workload, **options)
        assert_same(expected, history(step, workload, steps=steps, between=between))
    return step


def test_a_loop_with_the_planned_step_equals_one_without(ordinary):
    step = assert_loop_equals_eager(lambda: ordinary, budget="60%")
    assert step.solution.timeline.reruns > 0
    assert repr(step) == f"a planned step: {step.solution}"


def test_the_gradients_left_behind_are_eagers_own(ordinary):
    workload, other = ordinary, make()
    step = planned(workload)
    torch.manual_seed(3)
    step(workload[3])
    torch.manual_seed(3)
    plain(*other[1:])
    for p, q in zip(workload[1].parameters(), other[1].parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
        assert p.grad.stride() == q.grad.stride()


def test_without_in_place_forms_the_numbers_are_the_same(ordinary):
    step = assert_loop_equals_eager(lambda: ordinary, budget="60%", in_place=False)
    assert not any(getattr(s, "into", None) for s in step.solution.schedule.steps)


def test_what_the_step_returns_comes_back_whole():
    def more(model, optimizer, batch):
        return {"loss": plain(model, optimizer, batch), "note": ("text", 3, None)}

    workload = make(more)
    result = planned(workload)(workload[3])
    assert result["note"] == ("text", 3, None)
    assert isinstance(result["loss"], torch.Tensor)


def test_a_step_that_never_clears_its_gradients_is_captured_again_once_they_exist():
    def step(model, optimizer, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    with pytest.warns(UserWarning, match=r"0\.weight\.grad was None when the step began") as said:
        assert_loop_equals_eager(lambda: make(step), budget="80%", verify=True)
    assert len(said) == 1


# -- proof ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "steps"), [(True, 1), (2, 2)])
def test_verify_proves_the_plan_and_changes_nothing(ordinary, asked, steps):
    workload = ordinary
    before = state_of(workload)
    step = planned(workload, "75%", verify=asked)
    assert_untouched(workload, before)
    found = step.verification
    assert found.exact
    assert found.steps == steps
    assert found.measured_peak_bytes < found.eager_peak_bytes
    assert abs(found.prediction_error) < 0.01


def test_a_plan_is_proven_unless_that_is_switched_off_and_says_so(ordinary):
    by_default = checkpoint(*ordinary, budget="60%", strategy="mutwo", show_progress=False)
    assert by_default.verification.exact
    assert "proven equal to the bit, steps: 1" in str(by_default.solution)
    switched_off = planned(ordinary, verify=False)
    assert switched_off.verification is None
    assert "unproven: verify=False" in str(switched_off.solution)


def test_a_proof_can_be_had_at_any_time_and_changes_nothing(ordinary):
    workload = ordinary
    step = planned(workload, verify=False)
    loss = step(workload[3])
    before = snapshot(loss, *workload[1:3])
    found = step.prove(workload[3])
    assert_same([before], [snapshot(loss, *workload[1:3])])
    assert found.exact
    assert step.verification is found
    with pytest.raises(PlannerError, match="at least one step"):
        step.prove(workload[3], steps=0)


def test_proofs_during_a_run_come_before_every_so_many_calls(ordinary, monkeypatch):
    proofs = []
    real = rewriter.pipeline.ReadyStep.proof

    def counted(self, *args, **options):
        proofs.append(options["steps"])
        return real(self, *args, **options)

    monkeypatch.setattr(rewriter.pipeline.ReadyStep, "proof", counted)
    workload = ordinary
    step = planned(workload, prove_every=2, verify=False)
    for _ in range(5):
        step(workload[3])
    assert proofs == [1, 1]


@pytest.mark.parametrize("stage", ["capture", "measure_within", "apply", "observe"])
def test_a_failure_or_an_interrupt_at_any_stage_leaves_every_bit_as_before(stage, monkeypatch):
    real = getattr(rewriter.pipeline, stage)

    def interrupted(*args, **options):
        real(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(rewriter.pipeline, stage, interrupted)
    workload = make()
    before = state_of(workload)
    with pytest.raises(KeyboardInterrupt):
        planned(workload, verify=True)
    assert_untouched(workload, before)


def test_a_module_that_computes_something_else_is_refused_by_the_name_of_the_tensor(ordinary, monkeypatch):
    def slightly_wrong(traced, schedule, host):
        module = rewritten(traced, schedule, host)
        wrong = next(n for n in module.graph.nodes if n.name.startswith("convolution") and n.name.endswith("_again"))
        with module.graph.inserting_after(wrong):
            scaled = module.graph.call_function(torch.ops.aten.mul.Tensor, (wrong, 1.001))
        wrong.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
        module.recompile()
        return module

    rewritten = rewriter.pipeline.apply
    monkeypatch.setattr(rewriter.pipeline, "apply", slightly_wrong)
    workload = ordinary
    before = state_of(workload)
    with pytest.raises(VerificationError, match=r"first in gradient of \S+ after step 1 .*Nothing was changed"):
        planned(workload, "60%", verify=True)
    assert_untouched(workload, before)


def test_a_step_with_a_generator_of_its_own_is_proven_and_the_generator_left_alone():
    generator = torch.Generator().manual_seed(3)

    def noisy(model, optimizer, batch):
        return plain(model, optimizer, (batch[0] + torch.randn(batch[0].shape, generator=generator), batch[1]))

    state = generator.get_state()
    step = planned(make(noisy), "70%", verify=True)
    assert step.verification.exact
    assert dict(step.verification.compared)["generators"] == 2
    assert torch.equal(generator.get_state(), state)


# -- the user's own objects, in the user's own loop -------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [tiny.sgd, adam, fused_adamw])
def test_a_run_that_is_saved_and_resumed_equals_one_that_went_through(optimizer):
    expected = eager(make(optimizer=optimizer), steps=6)
    first = make(optimizer=optimizer)
    step, batches, seen = planned(first), varied(first[3], 6), []
    torch.manual_seed(1)
    for batch in batches[:3]:
        seen.append(snapshot(step(batch), *first[1:3]))
    saved = copy.deepcopy((first[1].state_dict(), first[2].state_dict()))
    generator = torch.get_rng_state()

    second = make(optimizer=optimizer)
    for p in second[1].parameters():
        nn.init.zeros_(p)
    second[1].load_state_dict(saved[0])
    second[2].load_state_dict(saved[1])
    step = planned(second)
    torch.set_rng_state(generator)
    for batch in batches[3:]:
        seen.append(snapshot(step(batch), *second[1:3]))
    assert_same(expected, seen)


def test_a_state_loaded_into_the_running_step_is_used(ordinary):
    workload = ordinary
    step = planned(workload)
    torch.manual_seed(1)
    step(workload[3])
    saved = copy.deepcopy((workload[1].state_dict(), workload[2].state_dict()))
    results = []
    for _ in range(2):
        torch.manual_seed(2)
        results.append(step(workload[3]))
        workload[1].load_state_dict(saved[0])
        workload[2].load_state_dict(saved[1])
    assert torch.equal(*results)


def test_evaluating_between_the_steps_disturbs_nothing(ordinary):
    evaluated = []

    def evaluate(i, model, optimizer):
        model.eval()
        with torch.no_grad():
            evaluated.append(model(tiny.images(3)[0]))
        model.train()

    assert_loop_equals_eager(lambda: ordinary, between=evaluate)
    for a, b in zip(evaluated[:3], evaluated[3:], strict=True):
        assert torch.equal(a, b)


def test_a_step_in_eval_mode_is_noticed_and_captured_as_such():
    def freeze_statistics(i, model, optimizer):
        model.train(mode=i != 1)

    with pytest.warns(UserWarning, match=r"module model\.training was True and is False") as said:
        assert_loop_equals_eager(make, budget="80%", between=freeze_statistics)
    assert len(said) == 1


@pytest.mark.parametrize("optimizer", [tiny.sgd, adam])
def test_a_changed_learning_rate_is_used_at_once(optimizer):
    def slow_down(i, model, optimizer):
        optimizer.param_groups[0]["lr"] *= 0.5

    assert_loop_equals_eager(lambda: make(optimizer=optimizer), between=slow_down)


def test_a_scheduler_made_before_goes_on_working():
    def loop(call_of):
        workload = make()
        scheduler = optim.lr_scheduler.CosineAnnealingLR(workload[2], T_max=5)
        call = call_of(workload)
        return history(call, workload, steps=5, between=lambda *_: scheduler.step())

    own = loop(lambda w: lambda batch: w[0](w[1], w[2], batch))
    assert_same(own, loop(planned))


def test_a_changed_weight_decay_is_noticed_said_once_and_honoured(ordinary):
    def decay(i, model, optimizer):
        if i == 1:
            optimizer.param_groups[0]["weight_decay"] = 0.5

    with pytest.warns(UserWarning, match="'weight_decay' of optimizer group 0 was 0.01 and is 0.5") as said:
        assert_loop_equals_eager(lambda: ordinary, between=decay)
    assert len(said) == 1
    assert said[0].filename.endswith("side_by_side.py"), "it points at the caller's line"


def test_a_schedule_of_momentum_ends_in_an_optimizer_that_runs_as_itself():
    def cycled():
        made = []

        def between(i, model, optimizer):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the scheduler is made after the first step
                if not made:
                    made.append(optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20))
                made[0].step()

        return between

    expected = eager(make(), steps=6, between=cycled())
    workload = make()
    step = planned(workload)
    with pytest.warns(UserWarning, match="momentum") as said:
        actual = history(step, workload, steps=6, between=cycled())
    assert_same(expected, actual)
    assert len(said) == 2, "twice, and then its numbers are its own"
    assert "from now on the optimizer runs as itself" in str(said[1].message)


def test_a_new_parameter_group_is_noticed_said_and_honoured():
    def only_the_end(model):
        model[0].requires_grad_(False)
        return optim.SGD(model[1:].parameters(), lr=0.1, momentum=0.9)

    def thaw(i, model, optimizer):
        if i == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})

    with pytest.warns(UserWarning, match="captured and planned anew") as said:
        assert_loop_equals_eager(lambda: make(optimizer=only_the_end), budget="80%", between=thaw)
    assert len(said) == 1
    assert "requires_grad was False and is True" in str(said[0].message)


def test_a_group_added_alone_is_named():
    workload = make()
    step = planned(workload)
    step(workload[3])
    workload[2].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(CaptureError, match=r"optimizer group 1 holds a parameter of shape \(1,\) that is not the "):
        call_with_warning(step, workload[3], match="had 1 parameter groups and has 2")


def call_with_warning(step, batch, *, match):
    with pytest.warns(UserWarning, match=match):
        return step(batch)


def test_a_layer_frozen_between_steps_is_noticed_said_and_honoured():
    def freeze(i, model, optimizer):
        if i == 1:
            model[0].requires_grad_(False)

    with pytest.warns(UserWarning, match=r"0\.weight\.requires_grad was True and is False") as said:
        assert_loop_equals_eager(make, budget="80%", between=freeze)
    assert len(said) == 1


# -- batches of other shapes ------------------------------------------------------------------------------------------


@pytest.fixture
def captures(monkeypatch):
    """How often a step was captured."""
    seen = []
    capture = rewriter.pipeline.capture

    def counted(*args, **kwargs):
        seen.append(args)
        return capture(*args, **kwargs)

    monkeypatch.setattr(rewriter.pipeline, "capture", counted)
    return seen


def test_the_last_batch_of_an_epoch_is_captured_once_and_remembered(captures):
    def epochs(call, batch):
        torch.manual_seed(1)
        for _ in range(2):
            for count in (8, 8, 5):
                yield call((batch[0][:count], batch[1][:count]))

    own, workload = make(), make()
    expected = [loss.item() for loss in epochs(lambda b: plain(own[1], own[2], b), own[3])]
    step = planned(workload, "70%")
    with pytest.warns(UserWarning, match=r"batch leaf 0 was torch.float32\[8, 3, 16, 16\].* and is .*\[5, ") as said:
        losses = [loss.item() for loss in epochs(step, workload[3])]
    assert losses == expected
    assert len(said) == 1
    assert len(captures) == 2
    assert_same([snapshot(None, *own[1:3])], [snapshot(None, *workload[1:3])])


def test_only_so_many_shapes_are_remembered_and_the_oldest_goes_first(ordinary, captures):
    workload = ordinary
    step = planned(workload, "100GiB", most_shapes=2)

    def call(count, *, captured):
        before = len(captures)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            step((workload[3][0][:count], workload[3][1][:count]))
        assert len(captures) - before == captured

    call(8, captured=0)
    call(6, captured=1)
    call(8, captured=0)
    call(4, captured=1)  # 6 goes: 8 was used since
    call(8, captured=0)
    call(6, captured=1)
    call(8, captured=0)


def test_the_solution_is_that_of_the_form_used_last(ordinary):
    workload = ordinary
    step = planned(workload, "70%")
    large = step.solution
    small = (workload[3][0][:4], workload[3][1][:4])
    call_with_warning(step, small, match="batch leaf 0")
    assert step.solution is not large
    assert step.solution.timeline.peak_bytes < large.timeline.peak_bytes
    step(workload[3])
    assert step.solution is large


def test_another_shape_that_does_not_fit_is_refused_and_the_old_one_goes_on(ordinary):
    workload = ordinary
    step = planned(workload, "60%")
    budget = step.solution.problem.budget_bytes
    fixed = planned(workload, budget)
    larger = tiny.images(64)
    before = state_of(workload)
    with pytest.raises(OverBudget, match="no plan fits"):
        call_with_warning(fixed, larger, match="batch leaf 0")
    assert_untouched(workload, before)
    fixed(workload[3])


def test_calls_leave_nothing_behind(ordinary):
    workload = ordinary
    step = planned(workload)
    batches = varied(workload[3], 4)

    def counted():
        gc.collect()
        objects = gc.get_objects()
        return len(objects), sum(issubclass(type(o), torch.Tensor) for o in objects)

    def call(times):
        for i in range(times):
            step(batches[i % 4])

    call(20)
    objects, tensors = counted()
    call(200)
    after = counted()
    assert after[1] == tensors
    assert after[0] - objects < 100, "less than one for every other call"


# -- what it tells ----------------------------------------------------------------------------------------------------


def test_the_step_tells_its_plan_its_timeline_and_its_reasons(ordinary):
    workload = ordinary
    step = planned(workload, "60%")
    assert isinstance(step, CheckpointedStep)
    solution = step.solution
    assert solution.strategy == "mutwo"
    assert "mutwo on Sequential: fits: peak" in str(solution)
    assert step.timeline() is solution.timeline
    assert step.timeline().peak_bytes <= solution.problem.budget_bytes
    assert step.module.graph is not None
    dropped = next(d for d in solution.decisions if d.choice is Choice.RECOMPUTE)
    told = step.explain(dropped.name)
    assert "dropped: " in told
    assert "µs to recompute" in told
    assert len(step.explain().splitlines()) == len(solution.decisions)


def test_explain_finds_tensors_by_the_words_of_their_module_and_name(ordinary):
    step = planned(ordinary, "60%")
    lines = step.explain("8 convolution").splitlines()
    assert lines
    assert all("convolution" in line for line in lines)
    assert any("(8)" in line for line in lines)
    assert step.explain("no-such-layer") == "no tensor of the step has 'no-such-layer' in its name or module path"


def test_a_saved_plan_is_applied_as_it_was_made(ordinary, tmp_path):
    made = planned(ordinary, "60%")
    made.save(tmp_path / "plan.json")
    workload = make()
    step = planned(workload, "60%", strategy="keep_all", plan=tmp_path / "plan.json", verify=True)
    assert step.solution.plan.evictions == made.solution.plan.evictions
    assert step.solution.strategy == "plan file"
    assert step.verification.exact


def test_a_bound_that_was_proven_for_slower_ops_is_not_held_against_a_saved_plan(ordinary, tmp_path):
    made = planned(ordinary, "60%").solution
    proven = with_bound(made.plan, lower_bound_us=1e12, bound_class=BoundClass.RECOMPUTE_ONCE)
    proven.save(tmp_path / "plan.json", made.problem.graph)
    assert planned(ordinary, "60%", plan=tmp_path / "plan.json").solution.gap is None


def test_a_plan_saved_as_csv_is_the_table_of_what_is_kept_and_recomputed(ordinary, tmp_path):
    made = planned(ordinary, "60%")
    made.save(tmp_path / "plan.CSV")
    rows = list(csv.DictReader((tmp_path / "plan.CSV").read_text().splitlines()))
    dropped = [row["name"] for row in rows if row["decision"] == "RECOMPUTE"]
    assert dropped == [d.name for d in made.solution.decisions if d.choice is Choice.RECOMPUTE]
    assert {row["decision"] for row in rows} == {"CHECKPOINT", "RECOMPUTE"}


def test_a_plan_for_another_graph_is_refused_and_nothing_is_changed(ordinary, tmp_path):
    planned(ordinary, "60%").save(tmp_path / "plan.json")
    for other in (make(batch_size=6), make(optimizer=adam)):
        before = state_of(other)
        with pytest.raises(FileFormatError, match=r"made for graph 'Sequential'.* differ; plan again for this graph"):
            planned(other, "60%", plan=tmp_path / "plan.json")
        assert_untouched(other, before)


def test_a_plan_that_does_not_fit_the_budget_is_refused(ordinary, tmp_path):
    planned(ordinary, "100GiB").save(tmp_path / "plan.json")
    with pytest.raises(OverBudget, match="plan file: no plan fits"):
        planned(ordinary, "60%", plan=tmp_path / "plan.json")


def test_a_batch_of_another_shape_is_planned_by_the_strategy_where_the_plan_is_for_the_first(ordinary, tmp_path):
    planned(ordinary, "60%").save(tmp_path / "plan.json")
    workload = ordinary
    step = planned(workload, "80%", plan=tmp_path / "plan.json")
    assert step.solution.strategy == "plan file"
    call_with_warning(step, (workload[3][0][:5], workload[3][1][:5]), match="batch leaf 0")
    assert step.solution.strategy == "mutwo"
    step(workload[3])
    assert step.solution.strategy == "plan file"


# -- gradients --------------------------------------------------------------------------------------------------------


def deep():
    """Gradients make most of the memory here."""
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 32), *(nn.Linear(32, 32) for _ in range(8)), nn.Linear(32, 4))


def clearing_at_the_end(model, optimizer, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def separate_sgd(model):
    """The largest parameter last: its decayed gradient is made when all the others could be gone."""
    return optim.SGD(list(model.parameters())[::-1], lr=0.01, momentum=0.9, weight_decay=0.01, foreach=False)


def keeping():
    return make(model=deep, optimizer=separate_sgd)


def clearing():
    return make(clearing_at_the_end, model=deep, optimizer=separate_sgd)


def above_start(case, **options):
    """Measured and predicted bytes that the unplanned step adds."""
    step = planned(case.workload, "100GiB", **options)
    return measured_peak(lambda: step(case.batch), case.workload), unplanned_bytes(step)


@pytest.mark.usefixtures("captured_once")
def test_a_step_that_clears_its_gradients_frees_them_as_early_as_it_can():
    kept, cleared = above_start(case_of(keeping)), above_start(case_of(clearing))
    assert cleared[0] < kept[0]
    assert cleared[0] == cleared[1]
    assert_loop_equals_eager(lambda: case_of(clearing).workload, budget="100GiB")


def without_gradients(seen):
    return [{name: value for name, value in record.items() if not name.startswith("grad ")} for record in seen]


@pytest.mark.usefixtures("captured_once")
@pytest.mark.parametrize("early", [False, True])
def test_gradients_can_be_freed_and_updates_applied_early_by_option(early):
    case = case_of(keeping)
    options = {"free_gradients": True, "early_updates": early}
    assert above_start(case, **options)[0] < above_start(case)[0]
    step = planned(case.workload, "100GiB", verify=True, **options)
    assert step.verification.exact
    with case.kept():
        actual = history(step, case.workload, steps=3)
        assert all(p.grad is None for p in case.model.parameters())
    assert_same(without_gradients(case.expected), without_gradients(actual))


@pytest.mark.usefixtures("captured_once")
def test_early_updates_take_less_than_freed_gradients_alone():
    freed = above_start(case_of(keeping), free_gradients=True)
    early = above_start(case_of(keeping), free_gradients=True, early_updates=True)
    assert early[0] < freed[0]
    assert early[0] == early[1]
