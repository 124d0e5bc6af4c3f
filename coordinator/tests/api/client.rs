//! A plain HTTP/1.1 client on a socket: it can also send what no HTTP library would.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Longer than anything a test waits for; a hang becomes a failure with a name.
pub const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }
    /// Null where the body is no JSON.
    pub fn json_or_null(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map(String::as_str)
            .unwrap_or_else(|| panic!("no header {name} in {:?}", self.headers))
    }
    /// The payloads of a stream, `[DONE]` included as a string.
    pub fn events(&self) -> Vec<Value> {
        let text = self.text();
        assert!(text.ends_with("\n\n"), "a stream ends with a blank line: {text:?}");
        text.split_terminator("\n\n")
            .map(|frame| {
                let data = frame
                    .strip_prefix("data: ")
                    .unwrap_or_else(|| panic!("not a data frame: {frame:?}"));
                assert!(!data.contains('\n'), "one line per event: {data:?}");
                serde_json::from_str(data).unwrap_or_else(|_| Value::from(data))
            })
            .collect()
    }
}

/// A status and a body that refuse `fields`, name one of them and say something about it.
pub fn assert_refused((status, body): &(u16, Value), (fields, param, about): (&Value, &str, &str)) {
    assert_eq!(
        (*status, &body["error"]["param"]),
        (400, &Value::from(param)),
        "{fields}: {body}"
    );
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.contains(about), "{message} does not say {about:?}");
}

pub async fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    post_with(address, path, body, &[]).await
}

pub async fn post_with(address: SocketAddr, path: &str, body: &Value, headers: &[(&str, &str)]) -> Answer {
    let body = body.to_string();
    send(address, &request("POST", path, headers, body.as_bytes())).await
}

pub async fn get(address: SocketAddr, path: &str) -> Answer {
    send(address, &request("GET", path, &[], b"")).await
}

/// To localhost; a body is JSON, unless the headers say what it is.
pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    if !body.is_empty() && !headers.iter().any(|(name, _)| *name == "content-type") {
        head += "content-type: application/json\r\n";
    }
    head += &format!("content-length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

/// Sends bytes, reads until the server closes, takes the answer apart.
pub async fn send(address: SocketAddr, bytes: &[u8]) -> Answer {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await.expect("connects");
        // A server that answers early may stop reading: the answer counts, not the rest of the request.
        let _ = stream.write_all(bytes).await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        parse(&answer)
    };
    tokio::time::timeout(PATIENCE, exchange)
        .await
        .expect("answered in time")
}

pub fn parse(raw: &[u8]) -> Answer {
    let end = raw.windows(4).position(|w| w == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no HTTP answer: {:?}", String::from_utf8_lossy(raw)));
    let head = String::from_utf8_lossy(&raw[..end]).into_owned();
    let mut lines = head.split("\r\n");
    let status = lines
        .next()
        .and_then(|line| line.split(' ').nth(1))
        .and_then(|code| code.parse().ok());
    let headers: BTreeMap<String, String> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        .collect();
    let rest = &raw[end + 4..];
    let is_chunked = headers.get("transfer-encoding").is_some_and(|value| value == "chunked");
    let body = if is_chunked { unchunk(rest) } else { rest.to_vec() };
    Answer {
        status: status.expect("a status line"),
        headers,
        body,
    }
}

fn unchunk(mut rest: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = rest.windows(2).position(|w| w == b"\r\n") {
        let size = usize::from_str_radix(&String::from_utf8_lossy(&rest[..end]), 16).expect("a chunk size");
        if size == 0 {
            break;
        }
        body.extend_from_slice(&rest[end + 2..end + 2 + size]);
        rest = &rest[end + 2 + size + 2..];
    }
    body
}
