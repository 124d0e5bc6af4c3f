//! Runs `scenarios/kv_*.txt`: commands to the scheduler of a prefill or a decode node, and what must come of each.
//!
//! A case is a command line, `----`, and the expected lines up to an empty line. `BATON_REWRITE=1` writes what came
//! instead of comparing; read the difference before committing it. Commands are listed in `World::command`.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serving_core::ids::{Attempt, ChoiceIndex, NodeEpoch, OutputIndex, RequestId, TokenId, TransferId};
use serving_core::node::{KvBlockCounts, NodeState, NodeStatus};
use serving_core::request::{AttemptKey, Lane, Request, SamplingParams, StopConditions, TokenEvent};
use serving_core::scheduler::{
    Admission, Admitted, Commit, NodeLimits, PushEnd, PushPlan, Refusal, SampledToken, Scheduler, SchedulerConfig,
    SchedulerEvent, StepPlan, Work,
};
use serving_core::time::Time;

#[test]
fn scenarios_come_out_as_written() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios");
    let mut ran = 0;
    for entry in std::fs::read_dir(&folder).expect("the scenarios are there") {
        let path = entry.expect("readable").path();
        let name = path.file_name().expect("a file").to_string_lossy().into_owned();
        if !name.starts_with("kv_") {
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("readable");
        let came = replay(&text);
        if std::env::var_os("BATON_REWRITE").is_some() {
            std::fs::write(&path, &came).expect("writable");
        } else {
            assert_eq!(came, text, "{name}");
        }
        ran += 1;
    }
    assert!(ran >= 3, "only {ran} scenarios were found");
}

/// The same file with the results that came.
fn replay(text: &str) -> String {
    let mut world = World::default();
    let mut out = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let _ = writeln!(out, "{line}");
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let expected = lines
            .by_ref()
            .skip_while(|line| *line != "----")
            .skip(1)
            .take_while(|line| !line.is_empty());
        expected.for_each(drop);
        let _ = writeln!(out, "----");
        for result in world.command(line) {
            let _ = writeln!(out, "{result}");
        }
        out.push('\n');
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
    out
}

/// `name key=value ..`
struct Words<'a> {
    name: &'a str,
    values: BTreeMap<&'a str, &'a str>,
}

impl<'a> Words<'a> {
    fn of(line: &'a str) -> Self {
        let mut words = line.split_whitespace();
        let name = words.next().expect("a command");
        let values = words.map(|word| word.split_once('=').unwrap_or((word, "1"))).collect();
        Self { name, values }
    }
    fn number(&self, key: &str, default: u32) -> u32 {
        self.values
            .get(key)
            .map_or(default, |value| value.parse().expect("a number"))
    }
    fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }
}

#[derive(Default)]
struct World {
    node: Option<Scheduler>,
    requests: BTreeMap<u32, Request>,
    now: Time,
}

impl World {
    fn command(&mut self, line: &str) -> Vec<String> {
        let words = Words::of(line);
        let id = words.number("id", 0);
        let mut results = match words.name {
            // prefill|decode blocks= budget= seqs= [no-cache]
            "prefill" | "decode" => self.make_node(&words),
            // accept id= prompt= max= [from=] [n=] [skip=] [batch]: without skip nothing is handed over.
            "accept" => self.accept(id, &words),
            // open id= prompt= max= [from=] [n=] [local]
            "open" => self.open(id, &words),
            "began" | "frame" => self.sign_of_life(id, words.name),
            "commit" => self.commit(id),
            "acked" => {
                self.node().push_ended(key(id), PushEnd::Acked);
                Vec::new()
            }
            // A block of the push has left.
            "pushed" => {
                let now = self.now;
                self.node().push_progressed(now, key(id));
                Vec::new()
            }
            "push-aborted" => {
                self.node().push_ended(key(id), PushEnd::Aborted);
                Vec::new()
            }
            "transfer-ended" => {
                self.node().transfer_ended(TransferId(u128::from(id)));
                Vec::new()
            }
            "cancel" => vec![format!("here={}", self.cancel(id))],
            // step [times=]
            "step" => (0..words.number("times", 1)).flat_map(|_| self.step()).collect(),
            // tick ms=
            "tick" => {
                self.now = self.now + Duration::from_millis(u64::from(words.number("ms", 0)));
                let now = self.now;
                self.node().tick(now);
                Vec::new()
            }
            "status" => Vec::new(),
            other => panic!("no such command: {other}"),
        };
        results.extend(self.events());
        results.push(self.blocks());
        if words.name == "status" {
            results.push(self.load());
        }
        results
    }

    fn node(&mut self) -> &mut Scheduler {
        self.node.as_mut().expect("a node")
    }

    fn make_node(&mut self, words: &Words<'_>) -> Vec<String> {
        let limits = NodeLimits {
            kv_blocks: words.number("blocks", 10),
            block_tokens: 4,
            max_batch_tokens: words.number("budget", 8),
            max_sequences: words.number("seqs", 4),
            max_model_tokens: 200,
            vocab_size: 1000,
            prefix_cache: !words.has("no-cache"),
        };
        let patience = Duration::from_secs(5);
        let config = match words.name {
            "prefill" => SchedulerConfig::prefill(limits, patience, None),
            _ => SchedulerConfig::decode(limits, patience),
        };
        *self = World {
            node: Some(Scheduler::new(config)),
            ..World::default()
        };
        Vec::new()
    }

    /// Prompts with the same `from` (default: the id) start alike.
    fn request(&mut self, id: u32, words: &Words<'_>) -> Arc<Request> {
        let from = words.number("from", id) * 100;
        let prompt: Arc<[TokenId]> = (0..words.number("prompt", 4))
            .map(|i| TokenId((from + i) % 1000))
            .collect();
        let request = Request {
            id: RequestId(u128::from(id)),
            client_prompt_tokens: prompt.len() as u32,
            constraint: Default::default(),
            prompt,
            sampling: SamplingParams::greedy(),
            stop: StopConditions {
                max_tokens: words.number("max", 4),
                min_tokens: 0,
                end_tokens: Vec::new(),
                stop_token_ids: Vec::new(),
            },
            choice_count: words.number("n", 1),
            seed: 0,
            logprobs: None,
            prompt_logprobs: None,
            prefix_salt: None,
            cache_tenant: None,
            report_kv_hashes: false,
            share: None,
            priority: 0,
            lane: match words.has("batch") {
                true => Lane::Batch,
                false => Lane::Interactive,
            },
            time_limit: Duration::from_secs(60),
        };
        self.requests.insert(id, request.clone());
        Arc::new(request)
    }

    fn accept(&mut self, id: u32, words: &Words<'_>) -> Vec<String> {
        let request = self.request(id, words);
        let push = words.has("skip").then(|| PushPlan {
            skip_blocks: words.number("skip", 0),
            is_streamed: false,
        });
        let permits = u64::from(request.prompt_tokens());
        match self.admit(request, permits, Work::Prefill(push)) {
            Ok(admitted) => vec![format!("accepted cached={}", admitted.cached_tokens)],
            Err(refusal) => vec![format!("refused: {refusal}")],
        }
    }

    fn open(&mut self, id: u32, words: &Words<'_>) -> Vec<String> {
        let request = self.request(id, words);
        let work = match words.has("local") {
            true => Work::Whole,
            false => Work::Decode(TransferId(u128::from(id))),
        };
        match self.admit(request, 1, work) {
            Ok(opened) => {
                let blocks: Vec<String> = opened.ticket_blocks.iter().map(|(b, g)| format!("{b}.{g}")).collect();
                let (prefix, blocks) = (opened.prefix_blocks, blocks.join(" "));
                vec![format!("opened prefix={prefix} ticket=[{blocks}]")]
            }
            Err(refusal) => vec![format!("refused: {refusal}")],
        }
    }

    fn admit(&mut self, request: Arc<Request>, permits: u64, work: Work) -> Result<Admitted, Refusal> {
        let now = self.now;
        let admission = Admission {
            request,
            attempt: Attempt(0),
            permits,
            coordinator: NodeEpoch(1),
            work,
        };
        self.node().admit(now, admission)
    }

    fn sign_of_life(&mut self, id: u32, what: &str) -> Vec<String> {
        let now = self.now;
        match what {
            "began" => self.node().prefill_began(now, key(id)),
            _ => self.node().frame_arrived(now, key(id)),
        }
        Vec::new()
    }

    fn commit(&mut self, id: u32) -> Vec<String> {
        let first_tokens = (0..self.requests[&id].choice_count).map(|choice| TokenEvent {
            choice: ChoiceIndex(choice),
            index: OutputIndex(0),
            token: TokenId(500),
            logprobs: None,
            finish: None,
        });
        let commit = Commit {
            key: key(id),
            transfer: TransferId(u128::from(id)),
            last_frame_at: self.now,
            first_tokens: first_tokens.collect(),
        };
        let now = self.now;
        match self.node().commit(now, commit) {
            Ok(()) => Vec::new(),
            Err(error) => vec![format!("not committed: {error}")],
        }
    }

    fn cancel(&mut self, id: u32) -> bool {
        self.node().cancel(key(id))
    }

    fn step(&mut self) -> Vec<String> {
        let now = self.now;
        let mut results = Vec::new();
        let node = self.node();
        match node.next_step(now) {
            Some(plan) => {
                let mut sampled = run(&plan, &mut results);
                node.step_done(now, &mut sampled);
            }
            None => results.push("nothing to run".to_owned()),
        }
        results.extend(self.events());
        results
    }

    fn events(&mut self) -> Vec<String> {
        let node = self.node();
        std::iter::from_fn(|| node.take_event())
            .map(|event| words_of(&event))
            .collect()
    }

    fn status(&self) -> NodeStatus {
        self.node.as_ref().expect("a node").status(NodeState::Ready)
    }

    fn blocks(&self) -> String {
        let KvBlockCounts {
            free,
            active,
            cached,
            reserved,
            in_transfer,
            quarantined,
        } = self.status().kv_blocks;
        let counts = [
            ("free", free),
            ("active", active),
            ("cached", cached),
            ("reserved", reserved),
            ("in_transfer", in_transfer),
            ("quarantined", quarantined),
        ];
        let words = counts
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| format!("{name}={count}"));
        format!("blocks {}", words.collect::<Vec<_>>().join(" "))
    }

    fn load(&self) -> String {
        let status = self.status();
        format!(
            "load running={} waiting={} tokens={} permits={} preemptions={} hits={}/{}",
            status.running_sequences,
            status.waiting_sequences,
            status.waiting_tokens,
            status.permits_granted_total - status.permits_received_total,
            status.preemptions_total,
            status.prefix_hit_tokens_total,
            status.prefix_query_tokens_total,
        )
    }
}

fn key(id: u32) -> AttemptKey {
    AttemptKey {
        request: RequestId(u128::from(id)),
        attempt: Attempt(0),
    }
}

/// Prints the plan and draws token 600 + output index for every draw.
fn run(plan: &StepPlan<'_>, results: &mut Vec<String>) -> Vec<SampledToken> {
    let mut sampled = Vec::new();
    let mut rows = Vec::new();
    for (i, row) in plan.rows().iter().enumerate() {
        let (id, end) = (row.key.request.0, row.first_position + row.token_count);
        let draws = if row.draws > 0 { "!" } else { "" };
        rows.push(format!("{id}.{}[{}..{end}]{draws}", row.choice, row.first_position));
        for choice in plan.draws(i) {
            let token = Ok(TokenId(600 + plan.output_index(i).0));
            sampled.push(SampledToken {
                row: i as u32,
                choice,
                token,
                logprobs: None,
            });
        }
    }
    results.push(format!("step {}", rows.join(" ")));
    sampled
}

fn words_of(event: &SchedulerEvent) -> String {
    match event {
        SchedulerEvent::BlocksReady { key, blocks } => {
            let blocks: Vec<String> = blocks
                .iter()
                .map(|push| format!("{}>{}", push.block, push.ticket_index))
                .collect();
            format!("  {}: push {}", key.request.0, blocks.join(" "))
        }
        SchedulerEvent::Held { key, .. } => format!("  {}: held", key.request.0),
        SchedulerEvent::AbortPush { key } => format!("  {}: abort the push", key.request.0),
        SchedulerEvent::CopyBlock { key, from, to } => format!("  {}: copy block {from} to {to}", key.request.0),
        SchedulerEvent::HashPrompt { key, blocks } => format!("  {}: hash {} blocks", key.request.0, blocks.len()),
        SchedulerEvent::Committed { key, .. } => format!("  {}: committed", key.request.0),
        SchedulerEvent::Token { key, event } => {
            let finish = event.finish.map_or(String::new(), |finish| format!(" {finish:?}"));
            format!("  {}.{}: output {}{finish}", key.request.0, event.choice, event.index)
        }
        SchedulerEvent::Finished { key, outcome, report } => format!(
            "  {}: finished {outcome:?} cached={} preemptions={}",
            key.request.0, report.cached_tokens, report.preemptions
        ),
        SchedulerEvent::Failed { key, failure, .. } => format!("  {}: failed {}", key.request.0, failure.name()),
        SchedulerEvent::CloseTransfer { transfer } => format!("  close transfer {}", transfer.0),
    }
}
