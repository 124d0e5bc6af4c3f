//! The command line of a process, flag by flag.

use std::ffi::OsString;

/// Builds a command line flag by flag.
#[derive(Debug, Default)]
pub(super) struct Flags(pub Vec<OsString>);

impl Flags {
    pub fn set(&mut self, name: &str, value: impl Into<OsString>) {
        let mut flag = OsString::from(format!("--{name}="));
        flag.push(value.into());
        self.0.push(flag);
    }

    pub fn set_true(&mut self, name: &str, is_set: bool) {
        if is_set {
            self.0.push(OsString::from(format!("--{name}")));
        }
    }

    pub fn set_some(&mut self, name: &str, value: &Option<impl ToString>) {
        if let Some(value) = value {
            self.set(name, value.to_string());
        }
    }
}
