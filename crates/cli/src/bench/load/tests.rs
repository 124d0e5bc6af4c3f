//! Whole runs against the server whose delays are known.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use serving_core::request::Lane;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _};
use workload::record::{LoopKind, Outcome, RequestRecord, RunPart};
use workload::trace::{Trace, TraceRequest, Turn};

use super::plan::{Endpoint, LoadPlan, Observer, Pace, Progress};
use super::scripted_server::{End, Script, ScriptedServer};
use super::*;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn trace(times: impl IntoIterator<Item = Duration>) -> Trace {
    let request = |at| TraceRequest {
        at,
        prompt_tokens: 20,
        output_tokens: 5,
        prefix_blocks: Vec::new(),
        lane: Lane::Interactive,
        conversation: None,
    };
    Trace {
        name: "test".to_owned(),
        block_tokens: 16,
        requests: times.into_iter().map(request).collect(),
    }
}

const QUICK: Script = Script {
    status: 200,
    first: ms(2),
    gap: ms(1),
    end: End::Whole,
};

async fn server(director: impl Fn(&str, u64) -> Script + Send + Sync + 'static) -> ScriptedServer {
    stalling(director, None).await
}

async fn stalling(
    director: impl Fn(&str, u64) -> Script + Send + Sync + 'static,
    stall: Option<(Duration, Duration)>,
) -> ScriptedServer {
    let address = "127.0.0.1:0".parse().expect("an address");
    ScriptedServer::start(address, Arc::new(director), stall)
        .await
        .expect("a free port")
}

fn plan(server: &ScriptedServer, trace: Trace) -> LoadPlan {
    LoadPlan::new(&server.url(), trace)
}

fn number(record: &RequestRecord) -> usize {
    record
        .id
        .rsplit('-')
        .next()
        .and_then(|number| number.parse().ok())
        .expect("ids end with the place in the trace")
}

#[tokio::test]
async fn every_token_has_its_time_and_the_servers_counts_are_taken() {
    let server = server(|_, _| QUICK).await;
    let mut plan = plan(&server, trace([ms(0), ms(10), ms(20)]));
    plan.warm_up_requests = 2;
    let done = run_with_texts(&plan, Observer::silent()).await.expect("a run");
    let run = &done.run;
    assert_eq!((run.records.len(), run.loop_kind), (3, LoopKind::Open));
    for record in &run.records {
        assert_eq!(record.outcome, Outcome::Completed);
        assert_eq!(
            (record.prompt_tokens, record.output_tokens, record.tokens.len()),
            (20, 5, 5)
        );
        assert!(record.scheduled <= record.sent && record.sent < record.tokens[0]);
        assert!(record.tokens.is_sorted() && record.tokens[4] <= record.ended);
    }
    assert_eq!(run.records[1].scheduled, ms(10));
    assert!((run.offered - 100.0).abs() < 1.0, "{}", run.offered);
    assert_eq!(done.texts, vec![" tok tok tok tok tok".to_owned(); 3]);
    assert!(
        run.records
            .iter()
            .all(|record| record.output_hash == run.records[0].output_hash)
    );
    // The requests of the warm-up are not in the records, and no prompt is sent twice.
    let seen = server.seen();
    let mut prompts: Vec<String> = seen.values().map(|seen| seen.body["prompt"].to_string()).collect();
    prompts.sort_unstable();
    prompts.dedup();
    assert_eq!((seen.len(), prompts.len()), (5, 5));
    let body = &seen.values().next().expect("a request").body;
    assert_eq!(body["stream_options"], json!({"include_usage": true}));
    assert_eq!(
        (body["ignore_eos"].as_bool(), body["temperature"].as_f64()),
        (Some(true), Some(0.0))
    );
}

/// No coordinated omission: a client that waits for answers would have sent nothing during the stall, and one that counts from
/// sending would have hidden the wait.
#[tokio::test]
async fn a_stall_shows_in_full_in_every_request_that_was_due_meanwhile() {
    let (from, until) = (ms(200), ms(1500));
    let before = std::time::Instant::now();
    let server = stalling(|_, _| QUICK, Some((from, until))).await;
    let first = std::cell::OnceCell::new();
    let mut observer = Observer::silent();
    observer.on_progress = Box::new(|_| {
        first.get_or_init(std::time::Instant::now);
    });
    let run = run(&plan(&server, trace((0..85).map(|at| ms(at * 20)))), observer)
        .await
        .expect("a run");
    // Server and run both started between `before` and the first progress. So on the run's clock the stall began at `from` at
    // the latest, and it did not end before this:
    let end = until.saturating_sub(first.get().expect("progress is told").duration_since(before));
    let due = |record: &&RequestRecord| record.scheduled >= from && record.scheduled < end;
    let stalled: Vec<&RequestRecord> = run.records.iter().filter(due).collect();
    assert!(stalled.len() > 5, "{} requests until {end:?}", stalled.len());
    for record in &stalled {
        assert_eq!(record.outcome, Outcome::Completed);
        assert!(record.tokens[0] >= end, "{record:?}: the stall lasted until {end:?}");
    }
    // The client went on sending although no answer came.
    assert!(
        stalled.iter().filter(|record| record.sent < end).count() > 2,
        "{stalled:?}"
    );
}

#[tokio::test]
async fn each_way_to_fail_is_counted_as_what_it_is() {
    let script = |id: &str, _: u64| {
        let of = |status, end| Script { status, end, ..QUICK };
        match id.rsplit('-').next() {
            Some("0") => of(429, End::Whole),
            Some("1") => of(503, End::Whole),
            Some("2") => of(500, End::Whole),
            Some("3") => of(200, End::Breaks { after: 2 }),
            Some("4") => of(200, End::Error { after: 3 }),
            Some("5") => Script {
                first: Duration::from_secs(3600),
                ..QUICK
            },
            _ => QUICK,
        }
    };
    let server = server(script).await;
    let mut plan = plan(&server, trace([Duration::ZERO; 7]));
    plan.request_timeout = ms(500);
    let run = run(&plan, Observer::silent()).await.expect("a run");
    let outcome = |at: usize| run.records[at].outcome.clone();
    let error = |at: usize| match outcome(at) {
        Outcome::Failed { error } => error,
        other => panic!("request {at}: {other:?}"),
    };
    assert_eq!(outcome(0), Outcome::Refused { status: 429 });
    assert_eq!(outcome(1), Outcome::Refused { status: 503 });
    assert!(error(2).contains("as the script says"), "{}", error(2));
    assert!(error(3).contains("broke"), "{}", error(3));
    assert!(error(4).contains("as the script says"), "{}", error(4));
    assert!(error(5).contains("no end within"), "{}", error(5));
    assert_eq!(outcome(6), Outcome::Completed);
    let tokens: Vec<usize> = run.records.iter().map(|record| record.tokens.len()).collect();
    // The last tokens before a break may be lost with the connection.
    assert!(tokens[3] <= 2, "{tokens:?}");
    assert_eq!((&tokens[..3], &tokens[4..]), (&[0; 3][..], &[3, 0, 5][..]));
    assert!(run.records[..6].iter().all(|record| record.output_hash.is_none()));
}

#[tokio::test]
async fn a_closed_loop_has_never_more_requests_than_users() {
    let server = server(|_, _| QUICK).await;
    let mut plan = plan(&server, trace([Duration::ZERO; 12]));
    plan.pace = Pace::Closed { users: 3 };
    let run = run(&plan, Observer::silent()).await.expect("a run");
    assert_eq!((run.loop_kind, run.offered), (LoopKind::Closed, 3.0));
    for record in &run.records {
        let overlaps = |other: &&RequestRecord| other.sent <= record.sent && record.sent < other.ended;
        let running = run.records.iter().filter(overlaps).count();
        assert!(running <= 3, "{running} at {:?}", record.sent);
        assert_eq!(record.outcome, Outcome::Completed);
    }
}

#[tokio::test]
async fn a_turn_of_a_chat_has_the_real_answers_before_it() {
    let server = server(|_, _| QUICK).await;
    let mut trace = trace([ms(0), ms(0), ms(5)]);
    for (turn, at) in [(0, 0), (1, 2)] {
        trace.requests[at].conversation = Some(Turn {
            conversation: 9,
            turn,
            think_time: ms(20),
        });
    }
    // Both earlier messages are part of its length.
    trace.requests[2].prompt_tokens = 20 + 5 + 15;
    let mut plan = plan(&server, trace);
    plan.server.endpoint = Endpoint::Chat;
    let run = run(&plan, Observer::silent()).await.expect("a run");
    let seen = server.seen();
    let messages = |at: usize| seen[&run.records[at].id].body["messages"].clone();
    let (first, later) = (messages(0), messages(2));
    assert_eq!(first.as_array().map(Vec::len), Some(1));
    assert_eq!(later[0], first[0]);
    assert_eq!(
        later[1],
        json!({"role": "assistant", "content": " tok tok tok tok tok"})
    );
    let words = |message: &serde_json::Value| message["content"].as_str().map(|text| text.split(' ').count());
    assert_eq!((words(&later[0]), words(&later[2])), (Some(20), Some(15)));
    // Its time is not the trace's: the answer and the time to think come first.
    assert_eq!(number(&run.records[2]), 2);
    assert!(run.records[2].scheduled >= run.records[0].ended + ms(20));
}

#[tokio::test]
async fn cancelled_requests_are_told_apart_and_end_early() {
    let server = server(|_, _| QUICK).await;
    let mut plan = plan(&server, trace((0..40).map(ms)));
    plan.cancel_rate = 0.5;
    let run = run(&plan, Observer::silent()).await.expect("a run");
    let cancelled: Vec<&RequestRecord> = run.records.iter().filter(|r| r.outcome == Outcome::Cancelled).collect();
    assert!((8..=32).contains(&cancelled.len()), "{} of 40", cancelled.len());
    assert!(cancelled.iter().all(|record| (1..=5).contains(&record.tokens.len())));
    assert!(
        run.records
            .iter()
            .all(|r| r.outcome == Outcome::Cancelled || r.tokens.len() == 5)
    );
}

#[tokio::test]
async fn a_run_that_is_stopped_keeps_what_has_ended() {
    let server = server(|_, number| match number {
        0..4 => QUICK,
        _ => Script {
            first: Duration::from_secs(3600),
            ..QUICK
        },
    })
    .await;
    let plan = plan(&server, trace((0..8).map(|at| ms(at * 5))));
    let mut observer = Observer::silent();
    let stop = observer.stop.clone();
    observer.on_progress = Box::new(move |progress: Progress| {
        if progress.completed == 4 && progress.sent == 8 {
            stop.cancel();
        }
    });
    let run = run(&plan, observer).await.expect("a run");
    assert_eq!(run.records.len(), 4);
    assert_eq!(run.environment["interrupted"], json!(true));
    assert_eq!(run.environment["unfinished"], json!(4));
}

/// As after Ctrl-C while the requests of the warm-up are answered.
#[tokio::test]
async fn a_run_that_is_stopped_before_it_begins_sends_nothing() {
    let server = server(|_, _| QUICK).await;
    let observer = Observer::silent();
    observer.stop.cancel();
    let run = run(&plan(&server, trace([ms(0); 3])), observer).await.expect("a run");
    assert_eq!(run.environment["interrupted"], json!(true));
    assert_eq!(run.environment["unfinished"], json!(0), "none was sent");
    assert!(run.records.is_empty() && server.seen().is_empty());
}

#[tokio::test]
async fn warm_up_and_cool_down_are_told_by_the_time_that_a_request_was_due() {
    let server = server(|_, _| QUICK).await;
    let mut plan = plan(&server, trace((0..10).map(|at| ms(at * 10))));
    (plan.warm_up, plan.cool_down) = (ms(15), ms(30));
    let run = run(&plan, Observer::silent()).await.expect("a run");
    let parts: Vec<RunPart> = run.records.iter().map(|record| record.part).collect();
    assert_eq!(parts[..2], [RunPart::WarmUp; 2]);
    assert_eq!(parts[2..7], [RunPart::Measured; 5]);
    assert_eq!(parts[7..], [RunPart::CoolDown; 3]);
    // The time from the end of the warm-up to the first request is part of the load.
    assert_eq!(run.measured, run.records[6].ended.max(ms(60)) - ms(15));
}

#[tokio::test]
async fn plans_that_cannot_be_carried_out_say_so() {
    let gone = "http://127.0.0.1:1".to_owned();
    let error = run(&LoadPlan::new(&gone, trace([ms(0)])), Observer::silent())
        .await
        .expect_err("nobody listens");
    assert_eq!(crate::exit::of(&error), Exit::Unreachable);
    for change in [
        |plan: &mut LoadPlan| plan.cancel_rate = 1.5,
        |plan: &mut LoadPlan| plan.trace.requests.clear(),
        |plan: &mut LoadPlan| plan.pace = Pace::Closed { users: 0 },
        |plan: &mut LoadPlan| plan.trace.requests[0].prompt_tokens = u32::MAX,
        |plan: &mut LoadPlan| plan.trace.requests[0].at = Duration::MAX,
        |plan: &mut LoadPlan| plan.server.url = "not a url".to_owned(),
    ] {
        let mut plan = LoadPlan::new(&gone, trace([ms(0)]));
        change(&mut plan);
        let error = run(&plan, Observer::silent()).await.expect_err("a usage error");
        assert_eq!(crate::exit::of(&error), Exit::Usage, "{error:#}");
    }
}

/// What a server does with its connections.
#[derive(Clone, Copy, PartialEq)]
enum Closing {
    /// It answers once, says nothing of closing, and closes when the next request has come.
    AfterAnAnswer,
    /// It closes when a completion is asked for.
    BeforeAnyAnswer,
}

/// A server over plain sockets.
async fn closing(closing: Closing) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut socket = tokio::io::BufReader::new(socket);
                let request = read_request(&mut socket).await;
                if request.is_none_or(|line| closing == Closing::BeforeAnyAnswer && line.starts_with("POST")) {
                    return;
                }
                let event = |text: &str| format!("data: {text}\n\n");
                let token = event(r#"{"choices":[{"text":" tok"}]}"#);
                let last = event(r#"{"choices":[],"usage":{"prompt_tokens":20,"completion_tokens":5}}"#);
                let body = [token.repeat(5), last, event("[DONE]")].concat();
                let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
                let answer = format!("{head}{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
                socket
                    .get_mut()
                    .write_all(answer.as_bytes())
                    .await
                    .expect("the client reads");
                read_request(&mut socket).await;
            });
        }
    });
    url
}

/// The first line of a request that was read to its end.
async fn read_request(socket: &mut tokio::io::BufReader<tokio::net::TcpStream>) -> Option<String> {
    let (mut length, mut first) = (0, None);
    loop {
        let mut line = String::new();
        socket.read_line(&mut line).await.ok().filter(|bytes| *bytes > 0)?;
        first.get_or_insert_with(|| line.clone());
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    socket.read_exact(&mut body).await.ok()?;
    first
}

/// llama-server closes each connection after a streamed answer and does not say so.
#[tokio::test]
async fn a_connection_that_was_closed_after_an_answer_costs_no_request() {
    let url = closing(Closing::AfterAnAnswer).await;
    let mut plan = LoadPlan::new(&url, trace((0..6).map(|at| ms(at * 30))));
    plan.server.model = Some("m".to_owned());
    let run = run(&plan, Observer::silent()).await.expect("a run");
    let outcomes: Vec<&Outcome> = run.records.iter().map(|record| &record.outcome).collect();
    assert_eq!(outcomes, vec![&Outcome::Completed; 6]);
}

#[tokio::test]
async fn a_connection_that_is_closed_before_any_answer_is_a_failed_request() {
    let url = closing(Closing::BeforeAnyAnswer).await;
    let mut plan = LoadPlan::new(&url, trace([ms(0), ms(10)]));
    plan.server.model = Some("m".to_owned());
    let run = run(&plan, Observer::silent()).await.expect("a run");
    let failed = run
        .records
        .iter()
        .filter(|record| matches!(record.outcome, Outcome::Failed { .. }));
    assert_eq!(failed.count(), 2);
}
