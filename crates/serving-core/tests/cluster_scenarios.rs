//! Runs `scenarios/cluster_*.txt`: lines of events, each followed by the actions it must cause (`> ...`), all of them.
//! `BATON_UPDATE_SCENARIOS=1` rewrites the expected lines; read the diff before you commit it.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serving_core::cluster::{
    Cluster, ClusterAction, ClusterConfig, ClusterEvent, Delivered, FinishedBy, Leg, LegError, LegEvent, NodeFault,
    OnIllegalTransition, PrefillOutcome, RefuseReason, StreamId,
};
use serving_core::compatibility::CompatibilityHash;
use serving_core::ids::{Attempt, ChoiceIndex, NodeEpoch, NodeId, NodeName, RequestId, TokenId, TransferId};
use serving_core::kv::ChainLink;
use serving_core::kv::prefix_log::{PrefixReport, prefix_keys};
use serving_core::node::{
    AssignedRole, KvBlockCounts, NodeCapacity, NodeRecord, NodeRole, NodeState, NodeStatus, PairHealth, Ticket,
};
use serving_core::request::{AttemptKey, Lane, Request, RequestError, SamplingParams, StopConditions};
use serving_core::routing::RoutingPolicy;
use serving_core::time::Time;

/// Words of one line: the plain ones in order, and the `key=value` ones.
struct Words<'a> {
    plain: Vec<&'a str>,
    named: BTreeMap<&'a str, &'a str>,
}

impl<'a> Words<'a> {
    fn of(line: &'a str) -> Self {
        let (named, plain) = line.split_whitespace().partition::<Vec<_>, _>(|w| w.contains('='));
        Self {
            plain,
            named: named.into_iter().filter_map(|w| w.split_once('=')).collect(),
        }
    }
    fn at(&self, i: usize) -> &'a str {
        self.plain
            .get(i)
            .unwrap_or_else(|| panic!("word {i} is missing in {:?}", self.plain))
    }
    fn number(&self, key: &str, default: u64) -> u64 {
        self.named.get(key).map_or(default, |v| {
            v.parse().unwrap_or_else(|_| panic!("{key}={v} is no number"))
        })
    }
}

struct Script {
    cluster: Cluster,
    now: Time,
    /// Stream of each life, by `name` or `name@epoch`.
    streams: BTreeMap<String, StreamId>,
    next_stream: u64,
}

fn node_id(word: &str) -> NodeId {
    let (name, epoch) = word.split_once('@').unwrap_or((word, "1"));
    NodeId {
        name: NodeName::new(name),
        epoch: NodeEpoch(epoch.parse().expect("epoch")),
    }
}

fn request_id(word: &str) -> RequestId {
    RequestId(word.trim_start_matches('r').parse().expect("request number"))
}

fn key(word: &str) -> AttemptKey {
    let (request, attempt) = word.split_once('.').expect("r<request>.<attempt>");
    AttemptKey {
        request: request_id(request),
        attempt: Attempt(attempt.parse().expect("attempt")),
    }
}

fn leg(word: &str) -> Leg {
    match word {
        "prefill" => Leg::Prefill,
        "decode" => Leg::Decode,
        other => panic!("no leg {other}"),
    }
}

fn config(words: &Words<'_>) -> ClusterConfig {
    let default = ClusterConfig::default();
    let ms = |key: &str, default: Duration| {
        Duration::from_millis(words.number(key, u64::try_from(default.as_millis()).expect("ms")))
    };
    ClusterConfig {
        queue_requests_max: usize::try_from(words.number("queue", 8)).expect("queue"),
        queue_wait_max: ms("queue_wait_ms", Duration::from_secs(10)),
        overtake_max: ms("overtake_ms", default.overtake_max),
        lease: ms("lease_ms", default.lease),
        model_name: Some("smol".into()),
        local_prefill_below_tokens: u32::try_from(words.number("short", 0)).expect("short"),
        allow_local_prefill: words.number("local", 1) == 1,
        attempts_max: u32::try_from(words.number("attempts", 4)).expect("attempts"),
        retries_free_per_minute: words.number("free_retries", 10),
        routing: RoutingPolicy::by_name(words.named.get("policy").unwrap_or(&"least-loaded")).expect("a policy"),
        open_timeout: ms("open_timeout_ms", Duration::from_secs(5)),
        prefill_start_timeout: ms("prefill_start_timeout_ms", Duration::from_secs(5)),
        stream_silence_max: ms("silence_ms", Duration::from_secs(30)),
        on_illegal_transition: OnIllegalTransition::Panic,
    }
}

impl Script {
    fn record(words: &Words<'_>) -> NodeRecord {
        let number = |key: &str, default| u32::try_from(words.number(key, default)).expect("u32");
        NodeRecord {
            id: node_id(words.at(2)),
            role: if words.at(1) == "prefill" {
                NodeRole::Prefill
            } else {
                NodeRole::Decode
            },
            is_co_located: words.at(1) == "co-located",
            address: format!("{}:1", words.at(2)),
            kv_address: format!("{}:1", words.at(2)),
            compatibility: CompatibilityHash([u8::try_from(words.number("group", 1)).expect("u8"); 32]).into(),
            transports: vec!["grpc".into()],
            version: "scenario".into(),
            capacity: NodeCapacity {
                kv_blocks: number("blocks", 64),
                block_tokens: 16,
                max_sequences: number("sequences", 4),
                max_batch_tokens: number("batch_tokens", 128),
                max_model_tokens: number("max_model", 2048),
                block_bytes: 1,
            },
            model_name: words.named.get("model").copied().unwrap_or("smol").into(),
            state: NodeState::Ready,
            roles: {
                let names = words.named.get("roles").into_iter().flat_map(|names| names.split(','));
                names.map(|name| AssignedRole::by_name(name).expect("a role")).collect()
            },
        }
    }

    fn request(words: &Words<'_>) -> Request {
        let prompt: Vec<TokenId> = (0..u32::try_from(words.number("prompt", 40)).expect("u32"))
            .map(TokenId)
            .collect();
        Request {
            id: request_id(words.at(1)),
            client_prompt_tokens: u32::try_from(prompt.len()).expect("u32"),
            constraint: Default::default(),
            prompt: Arc::from(prompt),
            sampling: SamplingParams::greedy(),
            stop: StopConditions {
                max_tokens: u32::try_from(words.number("max", 8)).expect("u32"),
                min_tokens: 0,
                end_tokens: vec![],
                stop_token_ids: vec![],
            },
            choice_count: u32::try_from(words.number("n", 1)).expect("u32"),
            seed: 1,
            logprobs: None,
            prompt_logprobs: words.named.get("prompt_logprobs").map(|v| v.parse().expect("logprobs")),
            prefix_salt: None,
            cache_tenant: None,
            report_kv_hashes: false,
            lane: if words.named.get("lane") == Some(&"batch") {
                Lane::Batch
            } else {
                Lane::Interactive
            },
            share: None,
            priority: words.named.get("priority").map_or(0, |v| v.parse().expect("priority")),
            time_limit: Duration::from_millis(words.number("limit_ms", 60_000)),
        }
    }

    fn status(words: &Words<'_>) -> NodeStatus {
        let bad = words.named.get("bad_pair").map(|d| PairHealth {
            decode_node: node_id(d),
            unusable_reason: Some("unreachable".into()),
            transport: None,
        });
        NodeStatus {
            state: if words.number("draining", 0) == 1 {
                NodeState::Draining
            } else {
                NodeState::Ready
            },
            permits_granted_total: words.number("granted", 0),
            permits_received_total: words.number("received", 0),
            permits_recalled_total: words.number("recalled", 0),
            permits_received_by: vec![],
            coordinators: u32::try_from(words.number("coordinators", 1)).expect("u32"),
            kv_blocks: KvBlockCounts {
                free: u32::try_from(words.number("free", 64)).expect("u32"),
                ..KvBlockCounts::default()
            },
            running_sequences: 0,
            waiting_sequences: 0,
            waiting_tokens: u32::try_from(words.number("waiting_tokens", 0)).expect("u32"),
            prefix_query_tokens_total: 0,
            prefix_hit_tokens_total: 0,
            preemptions_total: 0,
            computed_tokens_total: words.number("computed", 0),
            pairs: bad.into_iter().collect(),
        }
    }

    fn stream(&self, word: &str) -> StreamId {
        *self.streams.get(word).unwrap_or_else(|| panic!("{word} never joined"))
    }

    fn leg_error(words: &Words<'_>) -> LegError {
        let detail = "scripted".to_string();
        let fault = match words.at(3) {
            "unreachable" => return LegError::Unreachable { detail },
            "connection" => return LegError::ConnectionLost { detail },
            "engine" => NodeFault::Engine,
            "transfer" => NodeFault::Transfer,
            "peer" => NodeFault::Peer,
            "deadline" => NodeFault::Deadline,
            "internal" => NodeFault::Internal,
            "draining" => NodeFault::Draining,
            other => panic!("no error {other}"),
        };
        LegError::Node {
            fault,
            reason: words.at(3).into(),
            detail,
        }
    }

    fn leg_event(words: &Words<'_>) -> LegEvent {
        match words.at(0) {
            "opened" => LegEvent::Opened {
                ticket: (words.named.get("ticket") != Some(&"none")).then(ticket),
            },
            "accepted" => LegEvent::PrefillAccepted,
            "first" => LegEvent::FirstToken { leg: leg(words.at(2)) },
            "tokens" => LegEvent::TokensDelivered {
                leg: leg(words.at(2)),
                count: 1,
            },
            "committed" => LegEvent::Committed,
            "handed-over" => LegEvent::PrefillFinished {
                outcome: PrefillOutcome::HandedOver,
            },
            "ended-at-first" => LegEvent::PrefillFinished {
                outcome: PrefillOutcome::EndedAtFirstToken,
            },
            "decode-finished" => LegEvent::DecodeFinished,
            "refused" => LegEvent::Refused {
                leg: leg(words.at(2)),
                reason: match words.at(3) {
                    "no_capacity" => RefuseReason::NoCapacity,
                    "stale_epoch" => RefuseReason::StaleEpoch,
                    "draining" => RefuseReason::Draining,
                    "incompatible" => RefuseReason::Incompatible,
                    "invalid" => RefuseReason::Invalid,
                    other => panic!("no refusal {other}"),
                },
            },
            "failed" => LegEvent::Failed {
                leg: leg(words.at(2)),
                error: Self::leg_error(words),
            },
            other => panic!("no event {other}"),
        }
    }

    fn event(&mut self, words: &Words<'_>) -> ClusterEvent {
        match words.at(0) {
            "join" => {
                let stream = StreamId(self.next_stream);
                self.next_stream += 1;
                self.streams.insert(words.at(2).into(), stream);
                ClusterEvent::NodeJoined {
                    record: Self::record(words),
                    stream,
                }
            }
            "report" => ClusterEvent::NodeReported {
                stream: self.stream(words.at(1)),
                read_at: Time::from_millis(words.number("read", self.now.0 / 1_000_000)),
                status: Self::status(words),
            },
            "stood-still" => ClusterEvent::StoodStill {
                stillness: Duration::from_millis(words.number("ms", 0)),
            },
            // The first `tokens` of the prompt that every request of a scenario has.
            "prefixes" => {
                let tokens = u32::try_from(words.number("tokens", 0)).expect("tokens");
                let prompt: Vec<TokenId> = (0..tokens).map(TokenId).collect();
                ClusterEvent::PrefixesReported {
                    stream: self.stream(words.at(1)),
                    report: PrefixReport::Whole(prefix_keys(ChainLink::ROOT, &prompt, 16).collect()),
                }
            }
            "disconnect" => ClusterEvent::NodeDisconnected {
                stream: self.stream(words.at(1)),
            },
            "leave" => ClusterEvent::NodeLeft {
                stream: self.stream(words.at(1)),
            },
            "drain" => ClusterEvent::DrainNode {
                name: NodeName::new(words.at(1)),
                next_role: words
                    .named
                    .get("as")
                    .map(|role| AssignedRole::by_name(role).expect("a role")),
            },
            "shutdown" => ClusterEvent::DrainStarted,
            "tick" => ClusterEvent::Tick,
            "arrive" => ClusterEvent::RequestArrived {
                request: Arc::new(Self::request(words)),
            },
            "gone" => ClusterEvent::ClientGone {
                request: request_id(words.at(1)),
            },
            "slow" => ClusterEvent::StreamBroken {
                request: request_id(words.at(1)),
                error: RequestError::SlowReader {
                    behind_tokens: 9,
                    waited_ms: 9,
                },
            },
            "stop-string" => ClusterEvent::ChoiceFinished {
                request: request_id(words.at(1)),
                choice: ChoiceIndex(u32::try_from(words.number("choice", 0)).expect("u32")),
                by: FinishedBy::Edge,
            },
            "ended" => {
                let count = words.number("tokens", 0);
                let delivered = Delivered {
                    tokens: (0..count)
                        .map(|i| TokenId(900 + u32::try_from(i).expect("u32")))
                        .collect(),
                    token_count: count,
                    is_complete: words.number("complete", 0) == 1,
                };
                ClusterEvent::AttemptEnded {
                    key: key(words.at(1)),
                    delivered,
                }
            }
            _ => ClusterEvent::Leg {
                key: key(words.at(1)),
                event: Self::leg_event(words),
            },
        }
    }

    /// `at <ms> <event>`: the lines of what it caused.
    fn step(&mut self, line: &str) -> Vec<String> {
        let rest = line
            .strip_prefix("at ")
            .unwrap_or_else(|| panic!("expected `at MS EVENT`: {line}"));
        let (ms, event) = rest.split_once(' ').expect("an event");
        self.now = Time::from_millis(ms.parse().expect("milliseconds"));
        let words = Words::of(event);
        if words.at(0) == "stats" {
            return vec![stats(&self.cluster)];
        }
        let event = self.event(&words);
        let actions = self.cluster.apply(self.now, event);
        let mut lines: Vec<String> = actions.iter().filter_map(|a| self.show(a)).collect();
        if words.named.contains_key("wake") {
            let wake = self
                .cluster
                .next_wake()
                .map_or("never".into(), |t| (t.0 / 1_000_000).to_string());
            lines.push(format!("wake at {wake}"));
        }
        lines
    }

    fn show(&self, action: &ClusterAction) -> Option<String> {
        let k = |key: &AttemptKey| format!("r{}.{}", key.request.0, key.attempt);
        let n = |node: &NodeId| format!("{}@{}", node.name, node.epoch.0);
        let opt = |node: &Option<NodeId>| node.as_ref().map_or("none".into(), n);
        let s = |stream: &StreamId| {
            let name = self
                .streams
                .iter()
                .find(|(_, s)| *s == stream)
                .map(|(name, _)| name.as_str());
            name.unwrap_or("?").to_string()
        };
        Some(match action {
            ClusterAction::Place { key, placement: p } => format!(
                "place {} prefill={} decode={} local={} queued_ms={} ({})",
                k(key),
                opt(&p.prefill),
                opt(&p.decode),
                p.local.map_or("no", |l| l.name()),
                p.queued_for.as_millis(),
                p.route_reason
            ),
            ClusterAction::StartOpen {
                key,
                request,
                decode,
                local,
                permit_blocks,
                time_left,
                ..
            } => format!(
                "open {} on {} prompt={} client_prompt={} blocks={permit_blocks} local={} left_ms={}",
                k(key),
                n(&decode.node),
                request.prompt_tokens(),
                request.client_prompt_tokens,
                local.map_or("no", |l| l.name()),
                time_left.as_millis()
            ),
            ClusterAction::StartPrefill {
                key,
                prefill,
                ticket,
                permit_tokens,
                ..
            } => format!(
                "prefill {} on {} tokens={permit_tokens} ticket={}",
                k(key),
                n(&prefill.node),
                if ticket.is_some() { "yes" } else { "none" }
            ),
            ClusterAction::FailLeg { key, leg, error } => format!("fail {} {}: {error}", k(key), leg.name()),
            ClusterAction::CancelLeg { key, leg } => format!("cancel {} {}", k(key), leg.name()),
            ClusterAction::EndAttempt { key } => format!("end {}", k(key)),
            ClusterAction::Reject {
                request,
                reason,
                retry_after,
            } => format!(
                "reject r{} {} retry_after_ms={}",
                request.0,
                reason.name(),
                retry_after.map_or("never".into(), |d| d.as_millis().to_string())
            ),
            ClusterAction::Fail { request, error } => format!("fail r{} {}: {error}", request.0, error.name()),
            ClusterAction::Complete { request, attempts } => format!("complete r{} attempts={attempts}", request.0),
            ClusterAction::Forget { request } => format!("forget r{}", request.0),
            ClusterAction::WelcomeNode { stream } => format!("welcome {}", s(stream)),
            ClusterAction::RefuseNode { stream, reason } => format!("refuse {} {}", s(stream), reason.name()),
            // One for every report: noise.
            ClusterAction::RenewLease { .. } => return None,
            ClusterAction::SendPeers { stream, peers } => {
                let names: Vec<String> = peers.iter().map(|p| n(&p.id)).collect();
                format!("peers {} [{}]", s(stream), names.join(" "))
            }
            ClusterAction::TellPermits { stream, note } => format!(
                "permits {} wanted={} waited_ms={} returned={}",
                s(stream),
                note.wanted,
                note.waited.as_millis(),
                note.returned_total
            ),
            ClusterAction::RequestDrain { stream, next_role } => match next_role {
                Some(role) => format!("drain {} as={}", s(stream), role.name()),
                None => format!("drain {}", s(stream)),
            },
            ClusterAction::DropNode { node, .. } => format!("drop {}", n(node)),
        })
    }
}

fn ticket() -> Ticket {
    Ticket {
        transfer: TransferId(1),
        decode_node: node_id("d0"),
        decode_address: "d0:1".into(),
        blocks: vec![],
        prefix_blocks: 0,
        total_bytes: 0,
        expires_in: Duration::from_secs(5),
    }
}

fn stats(cluster: &Cluster) -> String {
    let stats = cluster.stats();
    let mut line = String::from("stats");
    for (reason, count) in &stats.retries {
        let _ = write!(line, " retry.{reason}={count}");
    }
    for (reason, count) in &stats.local_prefills {
        let _ = write!(line, " local.{}={count}", reason.name());
    }
    for ((transport, outcome), count) in &stats.handoffs {
        let _ = write!(line, " handoff.{transport}.{}={count}", outcome.name());
    }
    for (outcome, count) in &stats.migrations {
        let _ = write!(line, " migration.{}={count}", outcome.name());
    }
    for (lane, count) in &stats.shed {
        let _ = write!(line, " shed.{}={count}", lane.name());
    }
    if stats.node_rests > 0 {
        let _ = write!(line, " node_rests={}", stats.node_rests);
    }
    let _ = write!(
        line,
        " stale={} violations={}",
        stats.stale_events, stats.protocol_violations
    );
    line
}

/// The file with its expected lines replaced by what happened.
fn replay(text: &str) -> String {
    let mut script = None;
    let mut out = String::new();
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.starts_with('>') {
            continue;
        }
        out.push_str(line);
        out.push('\n');
        if let Some(rest) = trimmed.strip_prefix("cluster") {
            let cluster = Cluster::new(config(&Words::of(rest)));
            script = Some(Script {
                cluster,
                now: Time::ZERO,
                streams: BTreeMap::new(),
                next_stream: 1,
            });
        } else if !trimmed.is_empty() && !trimmed.starts_with('#') {
            let script = script.as_mut().expect("a scenario starts with a `cluster` line");
            for action in script.step(trimmed) {
                let _ = writeln!(out, "> {action}");
            }
        }
    }
    out
}

fn scenario_files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios");
    let entries = std::fs::read_dir(folder).expect("tests/scenarios");
    let mut files: Vec<PathBuf> = entries.map(|e| e.expect("entry").path()).collect();
    files.retain(|p| {
        p.file_name()
            .is_some_and(|n| n.to_string_lossy().starts_with("cluster_"))
    });
    files.sort();
    files
}

#[test]
fn scenarios_cause_exactly_the_written_actions() {
    let files = scenario_files();
    assert!(files.len() >= 6, "only {} scenario files found", files.len());
    let mut wrong = Vec::new();
    for path in files {
        let expected = std::fs::read_to_string(&path).expect("readable");
        let actual = replay(&expected);
        if std::env::var_os("BATON_UPDATE_SCENARIOS").is_some() {
            std::fs::write(&path, &actual).expect("writable");
        } else if let Some((i, (e, a))) = expected
            .lines()
            .zip(actual.lines())
            .enumerate()
            .find(|(_, (e, a))| e != a)
        {
            wrong.push(format!(
                "{}:{}\n  expected: {e}\n  got:      {a}",
                path.display(),
                i + 1
            ));
        } else if expected.lines().count() != actual.lines().count() {
            wrong.push(format!(
                "{}: {} lines expected, {} came",
                path.display(),
                expected.lines().count(),
                actual.lines().count()
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
