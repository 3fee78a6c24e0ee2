#![no_main]

forebay_fuzz::targets! {
    "forward_messages" => forebay_forward::fuzz::decode_messages,
}
