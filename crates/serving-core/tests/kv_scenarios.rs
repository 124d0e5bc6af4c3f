//! Runs `scenarios/kv_*.txt`: commands to a prefill and a decode batcher, and what must come of each.
//!
//! A case is a command line, `----`, and the expected lines up to an empty line. `BATON_REWRITE=1` writes what came
//! instead of comparing; read the difference before committing it. Commands are listed in `World::command`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serving_core::batching::{
    Commit, DecodeBatcher, DecodeConfig, DecodeEvent, NodeLimits, OpenCommand, PrefillBatcher, PrefillCommand,
    PrefillConfig, PrefillEvent, PromptSource, PushEnd, SampledToken, StepPlan,
};
use serving_core::ids::{Attempt, ChoiceIndex, NodeEpoch, OutputIndex, RequestId, TokenId, TransferId};
use serving_core::node::{KvBlockCounts, NodeState, NodeStatus};
use serving_core::request::{
    AttemptKey, Lane, LocalPrefillReason, Request, SamplingParams, StopConditions, TokenEvent,
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
    prefill: Option<PrefillBatcher>,
    decode: Option<DecodeBatcher>,
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
            // accept id= prompt= max= [from=] [n=] [skip=]: without skip nothing is handed over.
            "accept" => self.accept(id, &words),
            // open id= prompt= max= [from=] [n=] [local]
            "open" => self.open(id, &words),
            "began" | "frame" => self.sign_of_life(id, words.name),
            "commit" => self.commit(id),
            "acked" => {
                self.prefill().push_ended(key(id), PushEnd::Acked);
                Vec::new()
            }
            // A block of the push has left.
            "pushed" => {
                let now = self.now;
                self.prefill().push_progressed(now, key(id));
                Vec::new()
            }
            "push-aborted" => {
                self.prefill().push_ended(key(id), PushEnd::Aborted);
                Vec::new()
            }
            "transfer-ended" => {
                self.decode().transfer_ended(TransferId(u128::from(id)));
                Vec::new()
            }
            "cancel" => vec![format!("here={}", self.cancel(id))],
            // step [times=]
            "step" => (0..words.number("times", 1)).flat_map(|_| self.step()).collect(),
            // tick ms=
            "tick" => {
                self.now = self.now + Duration::from_millis(u64::from(words.number("ms", 0)));
                let now = self.now;
                self.prefill.iter_mut().for_each(|node| node.tick(now));
                self.decode.iter_mut().for_each(|node| node.tick(now));
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

    fn prefill(&mut self) -> &mut PrefillBatcher {
        self.prefill.as_mut().expect("a prefill node")
    }
    fn decode(&mut self) -> &mut DecodeBatcher {
        self.decode.as_mut().expect("a decode node")
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
        *self = World::default();
        match words.name {
            "prefill" => {
                self.prefill = Some(PrefillBatcher::new(PrefillConfig {
                    limits,
                    hold: patience,
                    last_chunk_tokens: None,
                }))
            }
            _ => {
                self.decode = Some(DecodeBatcher::new(DecodeConfig {
                    limits,
                    reservation: patience,
                }))
            }
        }
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
            report_kv_hashes: false,
            lane: Lane::Interactive,
            time_limit: Duration::from_secs(60),
        };
        self.requests.insert(id, request.clone());
        Arc::new(request)
    }

    fn accept(&mut self, id: u32, words: &Words<'_>) -> Vec<String> {
        let request = self.request(id, words);
        let now = self.now;
        let command = PrefillCommand {
            permit_tokens: u64::from(request.prompt_tokens()),
            coordinator: NodeEpoch(1),
            request,
            attempt: Attempt(0),
            handoff_skip_blocks: words.has("skip").then(|| words.number("skip", 0)),
            is_streamed: false,
        };
        match self.prefill().accept(now, command) {
            Ok(cached) => vec![format!("accepted cached={cached}")],
            Err(refusal) => vec![format!("refused: {refusal}")],
        }
    }

    fn open(&mut self, id: u32, words: &Words<'_>) -> Vec<String> {
        let request = self.request(id, words);
        let now = self.now;
        let source = match words.has("local") {
            true => PromptSource::Local(LocalPrefillReason::Short),
            false => PromptSource::Handoff(TransferId(u128::from(id))),
        };
        let command = OpenCommand {
            request,
            attempt: Attempt(0),
            permit_blocks: 1,
            coordinator: NodeEpoch(1),
            source,
        };
        match self.decode().open(now, command) {
            Ok(opened) => {
                let blocks: Vec<String> = opened.ticket_blocks.iter().map(|(b, g)| format!("{b}.{g}")).collect();
                vec![format!(
                    "opened prefix={} ticket=[{}]",
                    opened.prefix_blocks,
                    blocks.join(" ")
                )]
            }
            Err(refusal) => vec![format!("refused: {refusal}")],
        }
    }

    fn sign_of_life(&mut self, id: u32, what: &str) -> Vec<String> {
        let now = self.now;
        match what {
            "began" => self.decode().prefill_began(now, key(id)),
            _ => self.decode().frame_arrived(now, key(id)),
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
        match self.decode().commit(now, commit) {
            Ok(()) => Vec::new(),
            Err(error) => vec![format!("not committed: {error}")],
        }
    }

    fn cancel(&mut self, id: u32) -> bool {
        let on_prefill = self.prefill.as_mut().is_some_and(|node| node.cancel(key(id)));
        on_prefill || self.decode.as_mut().is_some_and(|node| node.cancel(key(id)))
    }

    fn step(&mut self) -> Vec<String> {
        let now = self.now;
        let mut results = Vec::new();
        if let Some(node) = &mut self.prefill
            && let Some(plan) = node.next_step(now)
        {
            let mut sampled = run(&plan, &mut results);
            node.step_done(now, &mut sampled);
        }
        if let Some(node) = &mut self.decode
            && let Some(plan) = node.next_step(now)
        {
            let mut sampled = run(&plan, &mut results);
            node.step_done(now, &mut sampled);
        }
        if results.is_empty() {
            results.push("nothing to run".to_owned());
        }
        results.extend(self.events());
        results
    }

    fn events(&mut self) -> Vec<String> {
        let mut results = Vec::new();
        if let Some(node) = &mut self.prefill {
            results.extend(std::iter::from_fn(|| node.take_event()).map(|event| prefill_words(&event)));
        }
        if let Some(node) = &mut self.decode {
            results.extend(std::iter::from_fn(|| node.take_event()).map(|event| decode_words(&event)));
        }
        results
    }

    fn status(&self) -> NodeStatus {
        let prefill = self.prefill.as_ref().map(|node| node.status(NodeState::Ready));
        prefill
            .or_else(|| self.decode.as_ref().map(|node| node.status(NodeState::Ready)))
            .expect("a node")
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

fn prefill_words(event: &PrefillEvent) -> String {
    match event {
        PrefillEvent::BlocksReady { key, blocks } => {
            let blocks: Vec<String> = blocks
                .iter()
                .map(|push| format!("{}>{}", push.block, push.ticket_index))
                .collect();
            format!("  {}: push {}", key.request.0, blocks.join(" "))
        }
        PrefillEvent::FirstTokens {
            key, tokens, continues, ..
        } => {
            format!(
                "  {}: {} first tokens, continues={continues}",
                key.request.0,
                tokens.len()
            )
        }
        PrefillEvent::AbortPush { key } => format!("  {}: abort the push", key.request.0),
        PrefillEvent::Finished {
            key,
            outcome,
            cached_tokens,
            ..
        } => {
            format!("  {}: finished {outcome:?} cached={cached_tokens}", key.request.0)
        }
        PrefillEvent::Failed { key, failure } => format!("  {}: failed {}", key.request.0, failure.name()),
    }
}

fn decode_words(event: &DecodeEvent) -> String {
    match event {
        DecodeEvent::CopyBlock { key, from, to } => format!("  {}: copy block {from} to {to}", key.request.0),
        DecodeEvent::HashPrompt { key, blocks } => format!("  {}: hash {} blocks", key.request.0, blocks.len()),
        DecodeEvent::Committed { key, .. } => format!("  {}: committed", key.request.0),
        DecodeEvent::Token { key, event } => {
            let finish = event.finish.map_or(String::new(), |finish| format!(" {finish:?}"));
            format!("  {}.{}: output {}{finish}", key.request.0, event.choice, event.index)
        }
        DecodeEvent::Finished { key, report } => {
            format!(
                "  {}: finished cached={} preemptions={}",
                key.request.0, report.cached_tokens, report.preemptions
            )
        }
        DecodeEvent::Failed { key, failure } => format!("  {}: failed {}", key.request.0, failure.name()),
        DecodeEvent::CloseTransfer { transfer } => format!("  close transfer {}", transfer.0),
    }
}
