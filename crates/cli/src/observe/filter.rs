//! The filters of `/admin/requests` and `/admin/events` as flags.

use clap::Args;

#[derive(Clone, Debug, Default, Args)]
pub struct FilterArgs {
    /// Only with this outcome: ok, cancelled, or an error's.
    #[arg(long, value_name = "OUTCOME")]
    pub outcome: Option<String>,
    /// Only of this lane: interactive, batch.
    #[arg(long, value_name = "LANE")]
    pub lane: Option<String>,
    /// Only of this model.
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Only those that this node prefilled or decoded.
    #[arg(long, value_name = "NODE")]
    pub node: Option<String>,
    /// Only those that broke a limit of their SLO.
    #[arg(long)]
    pub breached: bool,
    /// Only those whose stream stalled.
    #[arg(long)]
    pub stalled: bool,
    /// Only those that took longer, from the first byte to the last token.
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub slower_than_ms: Option<f64>,
}

impl FilterArgs {
    pub fn query(&self) -> Vec<(&'static str, String)> {
        let flag = |is_set: bool| is_set.then(|| "true".to_owned());
        let members = [
            ("outcome", self.outcome.clone()),
            ("lane", self.lane.clone()),
            ("model", self.model.clone()),
            ("node", self.node.clone()),
            ("breached", flag(self.breached)),
            ("stalled", flag(self.stalled)),
            ("slower_than_ms", self.slower_than_ms.map(|ms| ms.to_string())),
        ];
        let set = members.into_iter();
        set.filter_map(|(name, value)| value.map(|value| (name, value)))
            .collect()
    }
}

fn milliseconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(ms) if ms.is_finite() && ms >= 0.0 => Ok(ms),
        _ => Err("a number of milliseconds, 0 or more".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_asked_for_is_in_the_query() {
        let filter = FilterArgs {
            node: Some("decode-1".to_owned()),
            stalled: true,
            slower_than_ms: Some(250.5),
            ..FilterArgs::default()
        };
        let expected = [("node", "decode-1"), ("stalled", "true"), ("slower_than_ms", "250.5")];
        let query = filter.query();
        let query: Vec<(&str, &str)> = query.iter().map(|(name, value)| (*name, value.as_str())).collect();
        assert_eq!(query, expected);
        assert!(milliseconds("-1").is_err() && milliseconds("nan").is_err() && milliseconds("inf").is_err());
    }
}
