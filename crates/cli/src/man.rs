//! `baton man DIR`: the manual pages of every verb, for `man baton`.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Command};

use crate::exit::Exit;

#[derive(Debug, Args)]
pub struct ManArgs {
    /// The folder to write the pages into; it is made when it is missing. `man -l DIR/baton.1` shows the first.
    pub dir: PathBuf,
}

/// `command` is the whole command line of `baton`.
pub fn run(args: &ManArgs, command: Command) -> anyhow::Result<Exit> {
    let dir = args.dir.display();
    std::fs::create_dir_all(&args.dir).with_context(|| format!("{dir} cannot be made"))?;
    clap_mangen::generate_to(command, &args.dir).with_context(|| format!("{dir} cannot be written to"))?;
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::CommandFactory;

    #[test]
    fn every_verb_that_people_use_has_a_page() {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path().join("man1");
        run(&ManArgs { dir: dir.clone() }, Cli::command()).expect("written");
        let page = |name: &str| std::fs::read_to_string(dir.join(name)).unwrap_or_default();
        assert!(page("baton.1").contains(".TH"));
        for verb in Cli::command().get_subcommands().filter(|verb| !verb.is_hide_set()) {
            let name = verb.get_name();
            assert!(page(&format!("baton-{name}.1")).contains(name), "{name} has no page");
        }
    }
}
