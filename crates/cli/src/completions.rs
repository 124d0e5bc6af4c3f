//! `baton completions SHELL`: a completion script on stdout.

use std::io::Write;

use clap::{Args, Command};
use clap_complete::Shell;

use crate::exit::Exit;

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell to write for.
    pub shell: Shell,
}

/// `command` is the whole command line of `baton`.
pub fn run(args: &CompletionsArgs, mut command: Command) -> anyhow::Result<Exit> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "baton", &mut script);
    std::io::stdout().lock().write_all(&script)?;
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::CommandFactory;

    #[test]
    fn every_shell_gets_a_script_that_names_the_binary() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "baton", &mut script);
            let script = String::from_utf8(script).expect("a script is text");
            for word in [
                "baton",
                "completions",
                "trace",
                "tap",
                "top",
                "status",
                "nodes",
                "slowest",
                "slower-than-ms",
            ] {
                assert!(script.contains(word), "{word} for {shell}");
            }
        }
    }
}
