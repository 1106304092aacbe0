//! Random lives of random requests under tiny limits: after every call the invariants hold, every
//! request finishes, and its output is that of its unconstrained run.

#![allow(clippy::unwrap_used)]
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]

mod support;

use dspark_sched::{
    BlockHash, BlockHashFn, BlockSize, CacheKeys, ChunkedPrefill, NewRequest, NumBlocks, NumTokens,
    RequestId, SchedulePlan, SchedulerConfig, SchedulingPolicy, Stopping, TokenId,
    default_block_hash,
};
use proptest::prelude::*;
use support::{Ended, Engine};

const VOCAB_SIZE: u32 = 23;

#[derive(Debug, Clone)]
struct Spec {
    /// Family of prompts with a common beginning, length of that, and length of the rest.
    family: u32,
    num_common: u32,
    num_own: u32,
    max_tokens: u32,
    min_tokens: u32,
    stop_token_id: Option<u32>,
    has_eos: bool,
    ignore_eos: bool,
    priority: i32,
    key: u64,
    skip_reading_prefix_cache: bool,
}

#[derive(Debug, Clone)]
enum Event {
    Add(Spec),
    Step,
    StepFailing(u64),
    StepAborting(u64),
    /// Abort in flight, and reuse the id at once.
    StepReplacing(u64, Spec),
    StepGrowing(u32),
    StepShrinking(u32),
    StepCancelled,
    Abort(u64),
    Grow(u32),
    Shrink(u32),
    VacateAndShrink(u32),
    ResetPrefixCache,
}

#[derive(Debug, Clone)]
struct Script {
    config: SchedulerConfig,
    hash: BlockHashFn,
    seed: u64,
    draft_percent: (u64, u64),
    events: Vec<Event>,
}

fn constant_hash(_: BlockHash, _: &[TokenId]) -> BlockHash {
    BlockHash(7)
}

fn spec() -> impl Strategy<Value = Spec> {
    let ends =
        (1_u32..12, 0_u32..5, prop::option::weighted(0.3, 0..VOCAB_SIZE), any::<[bool; 2]>());
    let rest = (-2_i32..3, prop_oneof![4 => Just(0_u64), 1 => Just(9)], prop::bool::weighted(0.1));
    ((0_u32..2, 0_u32..16, 0_u32..8), ends, rest).prop_map(
        |((family, num_common, num_own), (max_tokens, min_tokens, stop_token_id, eos), rest)| {
            Spec {
                family,
                num_common,
                num_own,
                max_tokens,
                min_tokens: min_tokens.min(max_tokens),
                stop_token_id,
                has_eos: eos[0],
                ignore_eos: eos[1],
                priority: rest.0,
                key: rest.1,
                skip_reading_prefix_cache: rest.2,
            }
        },
    )
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => spec().prop_map(Event::Add),
        12 => Just(Event::Step),
        1 => any::<u64>().prop_map(Event::StepFailing),
        2 => any::<u64>().prop_map(Event::StepAborting),
        1 => (any::<u64>(), spec()).prop_map(|(pick, spec)| Event::StepReplacing(pick, spec)),
        1 => (1_u32..6).prop_map(Event::StepGrowing),
        1 => (1_u32..6).prop_map(Event::StepShrinking),
        1 => Just(Event::StepCancelled),
        1 => any::<u64>().prop_map(Event::Abort),
        1 => (1_u32..8).prop_map(Event::Grow),
        1 => (1_u32..8).prop_map(Event::Shrink),
        1 => (1_u32..8).prop_map(Event::VacateAndShrink),
        1 => Just(Event::ResetPrefixCache),
    ]
}

fn config() -> impl Strategy<Value = SchedulerConfig> {
    let sizes = (1_u32..6, 6_u32..24, 1_u32..6, 0_u32..20, 10_u32..32);
    let drafts = (0_u32..5, 0_u32..2);
    let modes = (any::<[bool; 3]>(), prop::option::of(1_u32..9));
    (sizes, drafts, modes).prop_map(
        |((block_size, num_blocks, max_num_seqs, spare, max_model_len), (gamma, more), modes)| {
            let ([is_priority, is_chunked, enable_prefix_caching], threshold) = modes;
            let least = max_num_seqs.max(gamma + 1);
            let least = if is_chunked { least } else { least.max(max_model_len) };
            let long_prefill_token_threshold = threshold.map(NumTokens);
            SchedulerConfig {
                max_num_seqs,
                max_num_batched_tokens: NumTokens(least + spare),
                max_model_len: NumTokens(max_model_len),
                vocab_size: VOCAB_SIZE,
                block_size: BlockSize::new(block_size).unwrap(),
                num_blocks: NumBlocks(num_blocks),
                num_speculative_tokens: NumTokens(gamma),
                num_lookahead_tokens: NumTokens(if gamma > 0 { gamma + more } else { 0 }),
                policy: match is_priority {
                    true => SchedulingPolicy::Priority,
                    false => SchedulingPolicy::Fcfs,
                },
                chunked_prefill: match is_chunked {
                    true => ChunkedPrefill::Enabled { long_prefill_token_threshold },
                    false => ChunkedPrefill::Disabled,
                },
                enable_prefix_caching,
            }
        },
    )
}

fn script() -> impl Strategy<Value = Script> {
    let hash = prop_oneof![
        3 => Just(default_block_hash as BlockHashFn),
        1 => Just(constant_hash as BlockHashFn),
    ];
    let events = prop::collection::vec(event(), 1..80);
    let draft_percent = (0_u64..=100, prop_oneof![Just(0_u64), Just(15), Just(100)]);
    (config(), hash, any::<u64>(), draft_percent, events).prop_map(
        |(config, hash, seed, draft_percent, events)| Script {
            config,
            hash,
            seed,
            draft_percent,
            events,
        },
    )
}

fn new_request(id: u64, spec: &Spec, max_model_len: u32) -> NewRequest {
    let common = (0..spec.num_common).map(|index| (index * 5 + spec.family) % VOCAB_SIZE);
    let own = (0..spec.num_own).map(|index| (id as u32 * 7 + index * 3) % VOCAB_SIZE);
    let mut prompt = support::tokens(common.chain(own));
    prompt.push(TokenId(spec.family));
    prompt.truncate(max_model_len as usize - 1);
    let mut new = NewRequest::new(RequestId(id), prompt, NumTokens(spec.max_tokens));
    new.stopping = Stopping {
        max_tokens: NumTokens(spec.max_tokens),
        min_tokens: NumTokens(spec.min_tokens),
        stop_token_ids: spec.stop_token_id.map(TokenId).into_iter().collect(),
        eos_token_id: spec.has_eos.then_some(TokenId(3)),
        ignore_eos: spec.ignore_eos,
    };
    new.priority = spec.priority;
    if spec.key > 0 {
        new.cache_keys = CacheKeys { cache_salt: None, extra_keys: vec![spec.key] };
    }
    new.skip_reading_prefix_cache = spec.skip_reading_prefix_cache;
    new
}

fn pick_live(engine: &Engine, pick: u64) -> Option<RequestId> {
    let ids = engine.live_ids();
    (!ids.is_empty()).then(|| ids[pick as usize % ids.len()])
}

fn abort_one(engine: &mut Engine, pick: u64) {
    if let Some(request_id) = pick_live(engine, pick) {
        engine.abort(request_id);
    }
}

fn play_event(engine: &mut Engine, number: u64, event: &Event) {
    let max_model_len = engine.scheduler.config().max_model_len.0;
    let num_blocks = engine.scheduler.pool().num_blocks().0;
    match event {
        Event::Add(spec) => engine.add(new_request(number, spec, max_model_len)),
        Event::Step => engine.step(|_| {}, None),
        Event::StepFailing(pick) => engine.step(|_| {}, Some(*pick)),
        Event::StepAborting(pick) => engine.step(|engine| abort_one(engine, *pick), None),
        Event::StepReplacing(pick, spec) => engine.step(
            |engine| {
                let Some(request_id) = pick_live(engine, *pick) else {
                    return;
                };
                engine.abort(request_id);
                engine.add(new_request(request_id.0, spec, max_model_len));
            },
            None,
        ),
        Event::StepGrowing(more) => engine.step(|engine| engine.grow(num_blocks + more), None),
        Event::StepShrinking(fewer) => {
            engine.step(|engine| drop(engine.try_shrink(num_blocks.saturating_sub(*fewer))), None)
        }
        Event::StepCancelled => engine.step(
            |engine| {
                engine.scheduler.cancel_step().unwrap();
                engine.check();
            },
            None,
        ),
        Event::Abort(pick) => abort_one(engine, *pick),
        Event::Grow(more) => engine.grow(num_blocks + more),
        Event::Shrink(fewer) => drop(engine.try_shrink(num_blocks.saturating_sub(*fewer))),
        Event::VacateAndShrink(fewer) => {
            let asked = num_blocks.saturating_sub(*fewer).max(1);
            engine.scheduler.vacate(NumBlocks(asked)).unwrap();
            engine.check();
            let refused = engine.try_shrink(asked).is_err_and(|error| {
                !matches!(error, dspark_sched::Error::ShrinkBelowRequest { .. })
            });
            assert!(!refused, "vacated blocks are free");
        }
        Event::ResetPrefixCache => drop(engine.scheduler.reset_prefix_cache()),
    }
    engine.check();
}

fn play(script: &Script) -> (Vec<SchedulePlan>, Vec<Ended>) {
    let mut engine = Engine::new(script.config.clone(), script.hash, script.seed);
    engine.draft_percent = script.draft_percent;
    for (number, event) in (1..).zip(&script.events) {
        play_event(&mut engine, number, event);
    }
    engine.drain();
    (engine.plans, engine.ended)
}

/// 400, or more where `PROPTEST_CASES` asks for it.
fn num_cases() -> u32 {
    ProptestConfig::default().cases.max(400)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(num_cases()))]

    /// Also replays each script: equal calls give equal plans.
    #[test]
    fn every_request_gets_its_unconstrained_output(script in script()) {
        let first = play(&script);
        prop_assert_eq!(first, play(&script));
    }
}

/// A thousand requests, a third of them aborted at random times, leave nothing behind.
#[test]
fn a_thousand_requests_with_aborts_leak_nothing() {
    let mut config = support::config();
    config.vocab_size = VOCAB_SIZE;
    config.num_blocks = NumBlocks(24);
    let mut engine = Engine::new(config, default_block_hash, 1);
    for id in 0..1_000 {
        let mut new = support::request(id, (id % 7) as u32, 3 + (id % 11) as u32);
        new.stopping.eos_token_id = Some(TokenId(3));
        engine.add(new);
        if id % 3 == 0 {
            let pick = engine.random.below(100);
            engine.step(|engine| abort_one(engine, pick), None);
        }
        if engine.live_ids().len() > 20 {
            engine.step(|_| {}, None);
        }
    }
    engine.drain();
    assert_eq!(engine.ended.len(), 1_000);
}
