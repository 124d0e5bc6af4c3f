//! The observing verbs as a shell sees them: exit statuses, Ctrl-C, a reader that goes away.

#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

const ENDS_WITHIN: Duration = Duration::from_secs(20);
const HEAD: &str = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: ";

/// Answers every page of docs/reference/records.md until the test is over; the stream of events does not end by itself.
fn server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            thread::spawn(move || answer(socket));
        }
    });
    url
}

fn answer(mut socket: TcpStream) {
    let mut request = [0_u8; 8192];
    let length = socket.read(&mut request).unwrap_or(0);
    let request = String::from_utf8_lossy(&request[..length]).into_owned();
    let target = request.split(' ').nth(1).unwrap_or("/");
    if target.starts_with("/admin/events") {
        let _ = socket.write_all(format!("{HEAD}text/event-stream\r\n\r\n").as_bytes());
        let event = b"event: request\ndata: {\"seq\":1,\"state\":\"ended\",\"outcome\":\"ok\"}\n\n";
        // Until the reader is gone.
        while socket.write_all(event).is_ok() {}
        return;
    }
    let body = match target {
        "/admin/slo" => include_str!("../testdata/slo.json"),
        "/admin/cluster" => include_str!("../testdata/cluster.json"),
        _ => "{\"records\":[]}",
    };
    let _ = socket.write_all(format!("{HEAD}application/json\r\n\r\n{body}").as_bytes());
}

fn baton(url: &str, words: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(words)
        .env("BATON_ENDPOINT", url)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts")
}

fn status_of(mut child: Child) -> Option<i32> {
    let pid = child.id().to_string();
    let (sender, ended) = sync_channel(1);
    thread::spawn(move || sender.send(child.wait()));
    match ended.recv_timeout(ENDS_WITHIN) {
        Ok(status) => status.expect("a child of ours").code(),
        Err(_) => {
            let _ = Command::new("kill").args(["-KILL", &pid]).status();
            panic!("did not end within {ENDS_WITHIN:?}");
        }
    }
}

#[test]
fn exit_statuses_are_the_documented_ones() {
    let url = server();
    for (words, expected) in [
        (&["status"][..], 0),
        (&["nodes", "-o", "json"], 0),
        (&["top"], 0),
        (&["top", "--json"], 0),
        (&["slo", "--profile", "chat"], 0),
        (&["slo"], 3),
        (&["tap", "--count", "2"], 0),
        (&["trace", "last"], 1),
        (&["trace"], 2),
        (&["slo", "--profile", "nope"], 2),
        (&["status", "--url", "no url"], 2),
        (&["status", "--url", "http://127.0.0.1:1"], 4),
        (&["tap", "--url", "http://127.0.0.1:1"], 4),
        (&["top", "--url", "http://127.0.0.1:1"], 4),
    ] {
        assert_eq!(status_of(baton(&url, words)), Some(expected), "{words:?}");
    }
}

#[test]
fn ctrl_c_ends_a_tap_with_130() {
    let mut tap = baton(&server(), &["tap"]);
    // A reader that goes on, or the tap would end with its pipe full.
    let out = tap.stdout.take().expect("piped");
    let mut lines = BufReader::new(out).lines();
    lines.next().expect("a heading").expect("text");
    lines.next().expect("a request").expect("text");
    let reading = thread::spawn(move || lines.count());
    let pid = tap.id().to_string();
    let killed = Command::new("kill").args(["-INT", &pid]).status().expect("kill");
    assert!(killed.success());
    assert_eq!(status_of(tap), Some(130));
    reading.join().expect("read to its end");
}

#[test]
fn a_reader_that_goes_away_ends_a_tap_quietly() {
    let mut tap = baton(&server(), &["tap", "-o", "json"]);
    let mut errors = tap.stderr.take().expect("piped");
    {
        let out = tap.stdout.take().expect("piped");
        let mut lines = BufReader::new(out).lines();
        lines.next().expect("a request").expect("text");
    }
    assert_eq!(status_of(tap), Some(0));
    let mut said = String::new();
    errors.read_to_string(&mut said).expect("text");
    assert_eq!(said, "");
}
