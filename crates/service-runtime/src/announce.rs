//! The lines that a process prints on stdout: it packs weights, it listens, and it is ready. All text for people goes to stderr.

use std::io::Write;

use serde::{Deserialize, Serialize};

/// One JSON line on stdout. `baton up` and the tests read these lines instead of guessing from logs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Announcement {
    /// Printed once in each life, when every port is bound. The addresses hold the ports that the OS picked.
    Listening(Listening),
    /// Printed by a node a few times a second while it packs its weights, when that takes long. The first one comes before
    /// `Listening`.
    Packing {
        name: String,
        done_bytes: u64,
        total_bytes: u64,
    },
    /// Printed once in each life: by a node when a coordinator has welcomed it, by a coordinator right after `Listening`.
    Ready { role: String, name: String },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listening {
    /// `coordinator`, `prefill` or `decode`.
    pub role: String,
    pub name: String,
    /// Coordinator: the OpenAI API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<String>,
    /// Coordinator: the pages of operators, where they have an address of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin: Option<String>,
    /// Coordinator: membership.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub control: Option<String>,
    /// Node: gRPC, metrics and health on one port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
}

impl Listening {
    pub fn coordinator(name: &str, http: &str, control: &str) -> Self {
        Self {
            role: "coordinator".to_owned(),
            name: name.to_owned(),
            http: Some(http.to_owned()),
            admin: None,
            control: Some(control.to_owned()),
            address: None,
        }
    }

    pub fn node(role: &str, name: &str, address: &str) -> Self {
        Self {
            role: role.to_owned(),
            name: name.to_owned(),
            http: None,
            admin: None,
            control: None,
            address: Some(address.to_owned()),
        }
    }
}

impl Announcement {
    /// Writes the line and flushes. A closed stdout is no error: the reader is gone, so nobody needs the line.
    pub fn print(&self) {
        let _ = self.write(&mut std::io::stdout().lock());
    }

    fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        let line = serde_json::to_string(self)?;
        writeln!(out, "{line}")?;
        out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_look_as_documented() {
        let mut out = Vec::new();
        let listening = Listening::coordinator("c-0", "127.0.0.1:8000", "127.0.0.1:7400");
        Announcement::Listening(listening).write(&mut out).unwrap();
        Announcement::Listening(Listening::node("decode", "d-0", "127.0.0.1:7420"))
            .write(&mut out)
            .unwrap();
        Announcement::Ready {
            role: "decode".into(),
            name: "d-0".into(),
        }
        .write(&mut out)
        .unwrap();
        let text = String::from_utf8(out).unwrap();
        let expected = concat!(
            r#"{"event":"listening","role":"coordinator","name":"c-0","http":"127.0.0.1:8000","control":"127.0.0.1:7400"}"#,
            "\n",
            r#"{"event":"listening","role":"decode","name":"d-0","address":"127.0.0.1:7420"}"#,
            "\n",
            r#"{"event":"ready","role":"decode","name":"d-0"}"#,
            "\n"
        );
        assert_eq!(text, expected);
        for line in text.lines() {
            serde_json::from_str::<Announcement>(line).unwrap();
        }
    }
}
