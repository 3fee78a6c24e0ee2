//! `map`, `unmap`, `showmapped`, `device`.

use super::with_session;
use crate::api::{MapRequest, MappedImage};
use crate::cli::{GlobalArgs, MapArgs, MappedDeviceCommand, UnmapArgs};
use crate::client::session::CommandSession;
use crate::failure::Result;
use crate::ops::{ListMapped, MapImage, UnmapImage};
use crate::output::{Output, table};
use crate::spec::place_text;

/// Runs a command on mapped images by its longer name.
pub fn device(global: &GlobalArgs, output: Output, command: MappedDeviceCommand) -> Result<()> {
    match command {
        MappedDeviceCommand::Map(options) => map(global, output, options),
        MappedDeviceCommand::Unmap(options) => unmap(global, output, options),
        MappedDeviceCommand::List(_) => list(global, output),
    }
}

/// Maps an image and prints the path of its device.
pub fn map(global: &GlobalArgs, output: Output, options: MapArgs) -> Result<()> {
    let image = options.name.image;
    let request = MapRequest {
        pool: image.pool,
        image: image.image,
        read_only: options.read_only,
        connections: options.nbd_connections,
        timeout_s: options.timeout,
        reconnect_timeout_s: options.reconnect_timeout,
    };
    let mapped = CommandSession::daemon(global)?.call(&MapImage(request), None, |_| {})?;
    output.print(&mapped, |mapped| mapped.device.display().to_string())
}

/// Ends the device of a mapped image.
pub fn unmap(global: &GlobalArgs, output: Output, options: UnmapArgs) -> Result<()> {
    let request = UnmapImage { target: options.target.target, force: options.force };
    CommandSession::daemon(global)?.call(&request, None, |_| {})?;
    output.print(&(), |()| String::new())
}

/// Lists the mapped images.
pub fn list(global: &GlobalArgs, output: Output) -> Result<()> {
    let mapped = with_session(global, |session| session.call(ListMapped, |_| {}))?;
    if !output.is_json() {
        for each in &mapped {
            if let Some(failure) = &each.error {
                let device = each.device.display();
                let place = place_text(&each.pool, &each.namespace);
                eprintln!("forebay: warning: {device} ({place}/{}): {}", each.name, failure.message);
            }
        }
    }
    output.print(&mapped, |mapped| show(mapped))
}

fn show(mapped: &[MappedImage]) -> String {
    if mapped.is_empty() {
        return String::new();
    }
    let rows = mapped.iter().map(|each| {
        let device = each.device.display().to_string();
        vec![each.id.clone(), each.pool.clone(), each.namespace.clone(), each.name.clone(), each.snap.clone(), device]
    });
    table(&["id", "pool", "namespace", "image", "snap", "device"], &[], rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped() -> MappedImage {
        MappedImage {
            id: "0".into(),
            pool: "local".into(),
            namespace: String::new(),
            name: "disk1".into(),
            snap: "-".into(),
            device: "/dev/nbd0".into(),
            error: None,
        }
    }

    #[test]
    fn the_shapes_are_those_of_rbd() {
        assert_eq!(
            show(&[mapped()]),
            "id  pool   namespace  image  snap  device\n0   local             disk1  -     /dev/nbd0"
        );
        assert_eq!(show(&[]), "");
        let json = serde_json::to_string(&[mapped()]).expect("JSON");
        assert_eq!(
            json,
            r#"[{"id":"0","pool":"local","namespace":"","name":"disk1","snap":"-","device":"/dev/nbd0"}]"#
        );
    }
}
