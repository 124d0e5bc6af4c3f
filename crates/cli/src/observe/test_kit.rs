//! An HTTP server for tests. It answers by path, and in turn where a path has several answers. After the last answer it is
//! gone.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

#[derive(Clone, Debug)]
pub struct Answer {
    /// The beginning of the request's path and query.
    path: String,
    head: String,
    body: String,
}

impl Answer {
    pub fn json(path: &str, body: &str) -> Self {
        Self::with_status(path, "200 OK", body)
    }

    pub fn with_status(path: &str, status: &str, body: &str) -> Self {
        Self {
            path: path.to_owned(),
            head: format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n"),
            body: body.to_owned(),
        }
    }

    pub fn events(body: &str) -> Self {
        Self {
            path: "/admin/events".to_owned(),
            head: "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n".to_owned(),
            body: body.to_owned(),
        }
    }
}

#[derive(Debug)]
pub struct TestServer {
    pub url: String,
    asked: Arc<Mutex<Vec<String>>>,
}

impl TestServer {
    /// Each answer is given once. After the last one the server stops listening. Before that an unknown path gets a 404.
    pub async fn start(answers: Vec<Answer>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        tokio::spawn(async move {
            let mut answers: VecDeque<Answer> = answers.into();
            while !answers.is_empty() {
                let Ok((mut socket, _)) = listener.accept().await else {
                    return;
                };
                let mut request = vec![0_u8; 16384];
                let length = socket.read(&mut request).await.unwrap_or(0);
                let request = String::from_utf8_lossy(&request[..length]).into_owned();
                let target = request.split(' ').nth(1).unwrap_or("/").to_owned();
                let at = answers.iter().position(|answer| target.starts_with(&answer.path));
                seen.lock().unwrap_or_else(PoisonError::into_inner).push(target);
                let answer = at.and_then(|at| answers.remove(at));
                let answer = answer.unwrap_or_else(|| Answer::with_status("", "404 Not Found", ""));
                let _ = socket
                    .write_all(format!("{}{}", answer.head, answer.body).as_bytes())
                    .await;
                let _ = socket.shutdown().await;
            }
        });
        Self { url, asked }
    }

    /// The paths and queries that were asked for, in order.
    pub fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Replaces each value of a page in turn by one that no server should send. Only results that are still JSON are kept.
pub fn bent(page: &str) -> impl Iterator<Item = serde_json::Value> {
    const ODD: [&str; 8] = [
        "null",
        "-1",
        "1e308",
        "0.5",
        "\"\\u001b[2J\"",
        "[]",
        "{}",
        "18446744073709551615",
    ];
    page.match_indices(": ").flat_map(move |(at, _)| {
        let from = at + 2;
        let end = page[from..].find([',', '}', '\n']).map_or(page.len(), |end| from + end);
        let bend = move |odd: &str| serde_json::from_str(&format!("{}{odd}{}", &page[..from], &page[end..])).ok();
        ODD.into_iter().filter_map(bend)
    })
}

/// An address where nobody listens.
pub async fn nobody() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    format!("http://{}", listener.local_addr().expect("bound"))
}
