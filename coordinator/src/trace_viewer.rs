//! The address of one trace in the operator's trace viewer: `--trace-viewer-url`, which the console links to.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};
use thiserror::Error;

/// Stands in the address for the 32 hexadecimal digits of a trace id.
const TRACE_ID: &str = "{trace_id}";

/// An http or https address that has `{trace_id}` behind its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceViewerUrl(String);

#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum BadTraceViewerUrl {
    #[error("write {{trace_id}} where the trace id belongs, as in https://jaeger.example/trace/{{trace_id}}")]
    NoTraceId,
    #[error(
        "write http:// or https://, a host without a user's name and password, and a path, as in \
         https://jaeger.example/trace/{{trace_id}}"
    )]
    NotHttp,
}

impl FromStr for TraceViewerUrl {
    type Err = BadTraceViewerUrl;

    fn from_str(text: &str) -> Result<Self, BadTraceViewerUrl> {
        let text = text.trim();
        let (scheme, rest) = text.split_once("://").ok_or(BadTraceViewerUrl::NotHttp)?;
        let is_http = ["http", "https"].iter().any(|http| scheme.eq_ignore_ascii_case(http));
        let host_end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (host, behind_host) = rest.split_at(host_end);
        // Everybody who sees the console sees the address.
        let is_host = !host.is_empty() && !host.contains(['@', '{', '}', '\\']);
        let is_one_word = !text.contains(|c: char| c.is_whitespace() || c.is_control());
        if !is_http || !is_host || !is_one_word {
            return Err(BadTraceViewerUrl::NotHttp);
        }
        if !behind_host.contains(TRACE_ID) {
            return Err(BadTraceViewerUrl::NoTraceId);
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for TraceViewerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for TraceViewerUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_http_and_says_where_the_trace_id_belongs() {
        let good = [
            "https://jaeger.example/trace/{trace_id}",
            "http://127.0.0.1:3000/explore?traceID={trace_id}&orgId=1",
            "HTTPS://[::1]:16686/#/trace/{trace_id}",
        ];
        for text in good {
            assert_eq!(
                text.parse::<TraceViewerUrl>().map(|url| url.to_string()),
                Ok(text.to_owned())
            );
        }
        for text in [
            "https://jaeger.example/trace/",
            "https://jaeger.example",
            "http://h/{traceid}",
        ] {
            assert_eq!(
                text.parse::<TraceViewerUrl>(),
                Err(BadTraceViewerUrl::NoTraceId),
                "{text}"
            );
        }
        let bad = [
            "",
            "{trace_id}",
            "jaeger.example/{trace_id}",
            "javascript://x/%0aalert(1)/{trace_id}",
            "file:///{trace_id}",
            "https:///{trace_id}",
            "https://{trace_id}.example/",
            "https://user:password@jaeger.example/{trace_id}",
            "https://jaeger.example/a b/{trace_id}",
        ];
        for text in bad {
            assert_eq!(
                text.parse::<TraceViewerUrl>(),
                Err(BadTraceViewerUrl::NotHttp),
                "{text}"
            );
        }
    }
}
