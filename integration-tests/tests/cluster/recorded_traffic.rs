//! A recording of live traffic has no word of it, and a recording of its replay has the same shape.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use integration_tests::MODEL;
use integration_tests::cluster::{TestCluster, baton_executable, options};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStderr, Command};
use workload::prompts::TokenPrompts;
use workload::recording::same_shape;
use workload::trace::{ReadLimits, Trace, read};

/// Words that are in the prompts and must be nowhere else.
const MARKERS: [&str; 3] = ["xylophone", "quagmire", "Zanzibar"];
const WITHIN: Duration = Duration::from_secs(60);

/// `baton record` beside a cluster.
struct Recorder {
    process: Child,
    said: BufReader<ChildStderr>,
    out: PathBuf,
}

impl Recorder {
    async fn start(cluster: &TestCluster, out: PathBuf) -> Self {
        let mut process = Command::new(baton_executable().expect("baton"))
            .args(["record", "--url", &cluster.url(""), "--out"])
            .arg(&out)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("it starts");
        let mut said = BufReader::new(process.stderr.take().expect("piped"));
        let mut line = String::new();
        let first = tokio::time::timeout(WITHIN, said.read_line(&mut line)).await;
        first.expect("in time").expect("a line");
        assert!(line.contains("recording"), "{line}");
        Self { process, said, out }
    }

    /// Ctrl-C. Returns the file, and everything that the program has said.
    async fn stop(mut self) -> (Vec<u8>, String) {
        let pid = self.process.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
        kill_process(pid.expect("it runs"), Signal::INT).expect("signalled");
        let mut words = String::new();
        self.said.read_to_string(&mut words).await.expect("UTF-8");
        let output = tokio::time::timeout(WITHIN, self.process.wait_with_output()).await;
        let output = output.expect("in time").expect("it ended");
        words += &String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{words}");
        (std::fs::read(&self.out).expect("written"), words)
    }
}

fn trace_of(file: &[u8]) -> Trace {
    read("recording", &mut &file[..], &ReadLimits::default()).expect("a trace")
}

async fn completion(cluster: &TestCluster, prompt: Value, output_tokens: u32) -> Value {
    let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": true});
    cluster.post("/v1/completions", &body).await.expect("an answer")
}

/// Two conversations of two turns that share a system prompt, and a list of two prompts.
async fn live_traffic(cluster: &TestCluster) -> Vec<(u64, u64)> {
    let system = format!(
        "You answer in one word. {} {}",
        MARKERS[0],
        "Mind the manual. ".repeat(20)
    );
    let mut lengths = Vec::new();
    for question in [MARKERS[1], MARKERS[2]] {
        let mut messages = vec![
            json!({"role": "system", "content": system}),
            json!({"role": "user", "content": question}),
        ];
        for turn in 0..2 {
            let body = json!({"model": MODEL, "messages": messages, "max_tokens": 6 + turn, "ignore_eos": true});
            let answer = cluster.post("/v1/chat/completions", &body).await.expect("an answer");
            let usage = |name: &str| answer["usage"][name].as_u64().expect("a number");
            lengths.push((usage("prompt_tokens"), usage("completion_tokens")));
            messages.push(answer["choices"][0]["message"].clone());
            messages.push(json!({"role": "user", "content": format!("And then, {question}?")}));
        }
    }
    completion(
        cluster,
        json!([MARKERS[0], format!("{} {}", MARKERS[1], MARKERS[2])]),
        5,
    )
    .await;
    lengths
}

fn shared_blocks(trace: &Trace, one: usize, other: usize) -> usize {
    let (one, other) = (&trace.requests[one].prefix_blocks, &trace.requests[other].prefix_blocks);
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

fn turns(trace: &Trace) -> Vec<Option<u32>> {
    trace
        .requests
        .iter()
        .map(|request| Some(request.conversation?.turn))
        .collect()
}

/// Sends each prompt of a trace in turn, without its pauses.
async fn replay(cluster: &TestCluster, trace: &Trace) {
    let prompts = TokenPrompts::new(1_000..20_000, &[], 7).expect("enough tokens");
    for (at, request) in trace.requests.iter().enumerate() {
        completion(cluster, json!(prompts.token_ids(trace, at)), request.output_tokens).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recording_has_no_word_of_the_traffic_and_its_replay_has_the_same_shape() {
    let mut options = options("1p1d").expect("options");
    options.settings.engine = Some("stand-in".to_owned());
    let cluster = TestCluster::start_with(options).await.expect("a cluster");
    let folder = tempfile::tempdir().expect("a folder");
    let out = |name: &str| Path::new(folder.path()).join(name);

    completion(&cluster, json!("before the recording"), 3).await;
    let recorder = Recorder::start(&cluster, out("live.jsonl")).await;
    let lengths = live_traffic(&cluster).await;
    let (file, words) = recorder.stop().await;
    let text = String::from_utf8_lossy(&file).into_owned();
    for marker in MARKERS.iter().chain(&["manual", "assistant", "role", "hash"]) {
        assert!(
            !text.contains(marker) && !words.contains(marker),
            "{marker} is in {text} {words}"
        );
    }

    let live = trace_of(&file);
    let recorded: Vec<(u64, u64)> = live.requests[..4]
        .iter()
        .map(|request| (u64::from(request.prompt_tokens), u64::from(request.output_tokens)))
        .collect();
    assert_eq!(recorded, lengths);
    assert_eq!(
        live.requests.len(),
        6,
        "the list is two prompts, and nothing from before: {words}"
    );
    assert_eq!(turns(&live), [Some(0), Some(1), Some(0), Some(1), None, None]);
    let system_blocks = shared_blocks(&live, 0, 2);
    assert!(system_blocks >= 4, "the system prompt is shared: {text}");
    assert!(
        shared_blocks(&live, 0, 1) > system_blocks,
        "a turn shares all of the turn before it: {text}"
    );
    let most = live.requests.iter().flat_map(|request| &request.prefix_blocks).max();
    assert!(most < Some(&100), "blocks are numbers, not hashes: {text}");

    let recorder = Recorder::start(&cluster, out("again.jsonl")).await;
    replay(&cluster, &live).await;
    let (file, words) = recorder.stop().await;
    let again = trace_of(&file);
    // The replay left the pauses out, so only the order of times is compared.
    same_shape(&live, &again, WITHIN).unwrap_or_else(|difference| panic!("{difference}: {words} {again:?}"));
    cluster.stop().await.expect("stopped");
}
